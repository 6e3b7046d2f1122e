"""Muon orthogonalizes query, key and value matrices separately.

What: one weight holds the three; the update of each by itself has AdamW's usual size.
Why: orthogonalized together, the three share their directions, though each has a task of its own.
Cost: none; three square matrices instead of a tall one.
Source:
- Jordan et al. 2024: https://kellerjordan.github.io/posts/muon/
"""

split_qkv = True
