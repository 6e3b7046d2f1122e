"""Muon orthogonalizes query, key and value matrices separately.

What: one weight holds all three; each part's update is orthogonalized and scaled to AdamW's usual size.
Why: orthogonalized together, the three share directions, although each has its own task.
Cost: none; three square matrices instead of a tall one.
Try: `python -c "import torch; from nanoladder.optim.muon import *; x = torch.randn(1, 6, 2);
print(orthogonalize(NEWTON_SCHULZ, x)[0].norm(), orthogonalize_thirds(NEWTON_SCHULZ, x)[0].norm())"`: the second is
about √3 times as large, as each third has singular values of its own.
Source:
- Jordan et al. 2024: https://kellerjordan.github.io/posts/muon/
"""

split_qkv = True
