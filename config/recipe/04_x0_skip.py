"""Each block's input is a learned mixture with the token embedding.

What: two learned mixing weights per block, initialized to 1 and 0.
Why: later blocks still see the token itself, whatever has been added to the residual stream.
Cost: one elementwise pass over the residual stream per block. Not for tensor parallelism or pipelines.
Try: `python train.py config/recipe_small.py --recipe=x0_skip --max_steps=200 --eval_interval=200 --out_dir=out/x0_skip`
ends below out/base.
Source:
- Jordan et al. 2024, modded-nanogpt: https://github.com/KellerJordan/modded-nanogpt
"""

x0_skip = True
