"""RMSNorm instead of LayerNorm: the mean is not subtracted.

Stands on: smear

What: `nn.RMSNorm` with a gain.
Why: cheaper, and as good in most reports.
Cost: none.
Try: `python -c "import torch; from torch.nn.functional import *; x = torch.randn(4) + 9; print(layer_norm(x, [4]),
rms_norm(x, [4]))"`: LayerNorm removes the mean of 9, RMSNorm keeps it.
Source:
- Zhang & Sennrich 2019: https://arxiv.org/abs/1910.07467
"""

norm = "rms"
