"""Each token's embedding is normalized before the first block.

What: `F.rms_norm`, without a gain.
Why: embeddings begin with an RMS of 0.02, and a tied one cannot begin larger, because it is the head too. What the
blocks add soon outweighs it; normalized, the token itself stays.
Cost: an elementwise pass. Not for pipelines.
Source:
- Jordan et al. 2024, modded-nanogpt: https://github.com/KellerJordan/modded-nanogpt
"""

embedding_norm = True
