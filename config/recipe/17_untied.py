"""The head has a weight of its own; it and the embedding do not decay.

Stands on: smear

What: `tie_embeddings=False`, with embedding_lr and head_lr as multiples of the learning rate. The head begins as the
embedding does, or with zero_init as zeros.
Why: a row of the embedding gets a gradient only if its token occurs, one of the head at every token.
Cost: vocabulary × width more parameters, with their optimizer state. Not for pipelines.
Source:
- Press & Wolf 2017, for tying: https://arxiv.org/abs/1608.05859
- Jordan et al. 2024, modded-nanogpt: https://github.com/KellerJordan/modded-nanogpt
"""

tie_embeddings = False
embedding_lr = 4.0
head_lr = 1.0
