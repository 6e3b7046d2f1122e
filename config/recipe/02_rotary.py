"""Queries and keys are rotated by position; positions are not embedded.

What: in each block, pairs of channels are rotated by an angle that grows with the position.
Why: the score of a query and a key depends only on their distance, and need not be learned for each pair of positions.
Cost: an elementwise pass over queries and keys; fewer parameters. Not for pipelines.
Source:
- Su et al. 2021, "RoFormer": https://arxiv.org/abs/2104.09864
"""

position = "rotary"
