"""Each token's embedding is normalized before the first block.

What: `F.rms_norm`, without a gain.
Why: embeddings start with an RMS of 0.02, and a tied one cannot start larger, because it is also the head. What the
blocks add soon outweighs it; normalized, the token itself remains visible.
Cost: an elementwise pass. Not for pipelines.
Try: `python train.py config/recipe_small.py --recipe=embedding_norm --max_steps=200 --eval_interval=200
--out_dir=out/norm` ends below the same with `--recipe=polar_express`.
Source:
- Jordan et al. 2024, modded-nanogpt: https://github.com/KellerJordan/modded-nanogpt
"""

embedding_norm = True
