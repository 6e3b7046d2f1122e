"""A fraction of the previous token's embedding is added to each one.

What: the fraction is learned per channel and initialized to 0.2.
Why: a pair of tokens says more than one; without this, the first block has to combine them by attention.
Cost: an elementwise pass. A cache keeps the last embedding; processes that share a sequence exchange one. Not for
tensor parallelism or pipelines.
Try: `python train.py config/recipe_small.py --recipe=smear --max_steps=200 --eval_interval=200 --out_dir=out/smear`
ends far below out/base.
Source:
- Jordan et al. 2024, modded-nanogpt, "smear": https://github.com/KellerJordan/modded-nanogpt
- So et al. 2021, "Primer", whose convolutions do this to queries, keys and values: https://arxiv.org/abs/2109.08668
"""

smear = True
