"""Muon orthogonalizes query, key and value matrices separately.

What: one weight holds all three; each part's update is orthogonalized and scaled to AdamW's usual size.
Why: orthogonalized together, the three share directions, although each has its own task.
Cost: none; three square matrices instead of a tall one.
Source:
- Jordan et al. 2024: https://kellerjordan.github.io/posts/muon/
"""

split_qkv = True
