"""A moving average of the last fifty steps' weights is evaluated.

Stands on: smear

What: an exponential moving average, with a decay of 0.98, in the optimizer's state.
Why: averaging removes the noise of the last updates, as learning rate decay does.
Cost: a copy of the weights; a checkpoint holds both.
Try: `python train.py config/recipe_small.py --recipe=ema --max_steps=200 --eval_interval=200 --out_dir=out/ema` ends
above the same with `--recipe=smear`: in so short a run fifty steps are a quarter, and the average lags.
Source:
- Polyak & Juditsky 1992: https://doi.org/10.1137/0330046
- Hägele et al. 2024: https://arxiv.org/abs/2405.18392
"""

ema = True
