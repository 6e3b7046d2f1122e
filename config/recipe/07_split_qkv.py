"""Muon takes the matrices of queries, keys and values apart.

What: one weight holds the three; each is orthogonalized by itself, and its update has AdamW's usual size.
Why: orthogonalized together, the three share their directions, though each has a task of its own.
Cost: none; three square matrices instead of a tall one.
Source:
- Jordan et al. 2024: https://kellerjordan.github.io/posts/muon/
"""

split_qkv = True
