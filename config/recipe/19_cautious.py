"""Weight decay acts only on weights that the update also shrinks.

Stands on: smear

What: a weight is not decayed in a step whose update moves it away from zero.
Why: decay never works against the gradient.
Cost: a copy of the decayed weights during the update.
Source:
- Chen et al. 2025, "Cautious Weight Decay": https://arxiv.org/abs/2510.12402
"""

cautious_decay = True
