"""Each token's embedding is normalized before the first block.

What: `F.rms_norm`, without a gain.
Why: embeddings begin at 0.02, a fiftieth of what the blocks add, and a tied one cannot begin larger, as the head would.
Normalized, the token itself is there from the first step on.
Cost: an elementwise pass. Not for pipelines.
Source:
- Jordan et al. 2024, modded-nanogpt: https://github.com/KellerJordan/modded-nanogpt
"""

embedding_norm = True
