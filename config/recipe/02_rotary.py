"""Queries and keys are rotated by position; positions are not embedded.

What: in each block, pairs of channels (a, b) of queries and keys are rotated by an angle that grows with the position
p; the angles of the hs / 2 pairs, i = 0, 1, ..., grow by one radian per token down to nearly a ten-thousandth:

    θ = p · 10000^(-2i / hs)
    (a, b) → (a cos θ - b sin θ, a sin θ + b cos θ)

Why: a product of two rotated vectors depends on the difference of their angles, so the score of a query and a key
depends only on their distance, and need not be learned for each pair of positions.
Cost: an elementwise pass over queries and keys; fewer parameters. Not for pipelines.
Try: `python -c "import torch; from model import *; from nanoladder.config import Config; rotate =
Rotary(Config(n_head=1, n_embd=64)); q, k = torch.randn(2, 1, 1, 1, 64).expand(2, 1, 1, 5, 64); print(rotate(q)[0, 0] @
rotate(k)[0, 0].T)"` prints the scores of one query and one key at five positions: every diagonal is constant.
Source:
- Su et al. 2021, "RoFormer": https://arxiv.org/abs/2104.09864
"""

position = "rotary"
