"""Tables of embeddings learn at four times the rate, without decay.

What: token and value embeddings, and with them the head that is tied to them, take a multiple of the learning rate.
Why: Muon's matrices set the rate, but a row of a table gets a gradient only if its token occurs.
Cost: none.
Source:
- Jordan et al. 2024, modded-nanogpt: https://github.com/KellerJordan/modded-nanogpt
- Yang et al. 2022, "Tensor Programs V": https://arxiv.org/abs/2203.03466
"""

embedding_lr = 4.0
