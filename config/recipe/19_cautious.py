"""Weight decay acts only on weights that the update shrinks too.

Stands on: smear

What: the decay of a weight is dropped at each step whose update moves it away from zero.
Why: decay then never works against the gradient.
Cost: a copy of the decayed weights during the update.
Source:
- Chen et al. 2025, "Cautious Weight Decay": https://arxiv.org/abs/2510.12402
"""

cautious_decay = True
