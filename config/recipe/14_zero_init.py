"""Every block starts as the identity: its projections are zero.

Stands on: smear

What: the output projections of attention and the MLP, and an untied head, are initialized to zero.
Why: the first steps do not have to undo random blocks.
Cost: none.
Try: `python train.py config/recipe_small.py --recipe=zero_init --compile=False --max_steps=1 --eval_windows=16
--log_interval=1 --out_dir=out/zero`: the first loss is close to ln 4096 = 8.318, that of a uniform guess.
Source:
- Zhang et al. 2019, "Fixup": https://arxiv.org/abs/1901.09321
- Yang et al. 2022, "Tensor Programs V": https://arxiv.org/abs/2203.03466
"""

zero_init = True
