"""Learned mixing weights learn at four times the rate.

What: the mixing weights of x0_skip, value_embedding and smear take a multiple of the learning rate.
Why: they start between 0 and 1, and AdamW moves each by about the learning rate per step: hardly at all in a short run.
Cost: none.
Try: `python train.py config/recipe_small.py --recipe=scalar_lr --max_steps=200 --eval_interval=200
--out_dir=out/scalar_lr`: with `--scalar_lr=40` the mixing weights move ten times as far.
Source:
- Jordan et al. 2024, modded-nanogpt: https://github.com/KellerJordan/modded-nanogpt
"""

scalar_lr = 4.0
