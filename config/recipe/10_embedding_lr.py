"""Embeddings learn at four times the rate, without weight decay.

What: token and value embeddings, and a head tied to them, take a multiple of the learning rate.
Why: the rate is chosen for Muon's matrices, but a row of an embedding gets a gradient only if its token occurs.
Cost: none.
Source:
- Jordan et al. 2024, modded-nanogpt: https://github.com/KellerJordan/modded-nanogpt
- Yang et al. 2022, "Tensor Programs V": https://arxiv.org/abs/2203.03466
"""

embedding_lr = 4.0
