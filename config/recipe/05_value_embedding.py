"""Every second block adds a token embedding to attention's values.

What: each of these blocks has a table of vocabulary × width, scaled by a learned weight initialized to 0.5.
Why: more parameters without a matrix product; attention can pass on the token itself, not only what blocks computed.
Cost: these parameters and their optimizer state. Not for tensor parallelism or pipelines.
Try: `python ladder.py show value_embedding --standalone` has two tables beside the token embedding; `python train.py
config/recipe_small.py --recipe=value_embedding --max_steps=20 --eval_windows=16 --out_dir=out/values` counts 1.05
million parameters more than `--recipe=x0_skip`.
Source:
- Zhou et al. 2024, "Value Residual Learning": https://arxiv.org/abs/2410.17897
- Jordan et al. 2024, modded-nanogpt: https://github.com/KellerJordan/modded-nanogpt
"""

value_embedding = True
