"""Attention returns nothing of a position's own value.

What: `y - (y · v̂) v̂` for each head, where v̂ is the position's own value, normalized.
Why: attention tends to return much of a position's own value, which the residual stream has already. Without it, the
output speaks of the other positions alone, and a query that finds nothing can attend to itself at no effect.
Cost: a few operations per channel, two more activations; no parameters. A step of `recipe_small` takes as long, in 6 %
more memory.
Try: `python train.py config/recipe_small.py --recipe=exclusive_attention --max_steps=256 --eval_interval=256
--warmup_steps=20 --learning_rate=0.01 --min_lr=0.001 --weight_decay=0.05 --out_dir=out/exclusive` ends lower than the
same with `--recipe=smear`.
Source:
- Zhai 2026, "Exclusive Self Attention": https://arxiv.org/abs/2603.09078
"""

exclusive_attention = True
