"""Weight decay acts only on weights that the update also shrinks.

Stands on: smear

What: a weight is not decayed in a step whose update moves it away from zero.
Why: decay never works against the gradient.
Cost: a copy of the decayed weights during the update.
Try: `python ladder.py diff cautious` shows the whole change; `python train.py config/recipe_small.py --recipe=cautious
--max_steps=200 --eval_interval=200 --out_dir=out/cautious` ends where `--recipe=smear` does, within the noise of a
seed.
Source:
- Chen et al. 2025, "Cautious Weight Decay": https://arxiv.org/abs/2510.12402
"""

cautious_decay = True
