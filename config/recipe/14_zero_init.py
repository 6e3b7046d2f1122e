"""Every block begins as the identity: its projections are zeros.

Stands on: smear

What: zeros for the projections of attention and the MLP, and for an untied head.
Why: the first steps then do not have to undo random blocks.
Cost: none.
Source:
- Zhang et al. 2019, "Fixup": https://arxiv.org/abs/1901.09321
- Yang et al. 2022, "Tensor Programs V": https://arxiv.org/abs/2203.03466
"""

zero_init = True
