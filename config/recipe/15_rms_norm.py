"""RMSNorm instead of LayerNorm: the mean is not subtracted.

Stands on: smear

What: `nn.RMSNorm` with a gain.
Why: cheaper, and as good in most reports.
Cost: none.
Source:
- Zhang & Sennrich 2019: https://arxiv.org/abs/1910.07467
"""

norm = "rms"
