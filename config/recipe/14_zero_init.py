"""Every block starts as the identity: its projections are zero.

Stands on: smear

What: the output projections of attention and the MLP, and an untied head, are initialized to zero.
Why: the first steps do not have to undo random blocks.
Cost: none.
Source:
- Zhang et al. 2019, "Fixup": https://arxiv.org/abs/1901.09321
- Yang et al. 2022, "Tensor Programs V": https://arxiv.org/abs/2203.03466
"""

zero_init = True
