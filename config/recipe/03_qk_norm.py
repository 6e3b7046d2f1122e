"""Queries and keys are normalized, so that attention cannot saturate.

What: RMSNorm without a gain on each head's queries and keys, times 1.2, before the rotation.
Why: scores are bounded, so training is stable at higher learning rates.
Cost: an elementwise pass over queries and keys.
Try: `python -c "import torch; from torch.nn.functional import rms_norm; q, k = 1.2 * rms_norm(1000 * torch.randn(2,
10**5, 64), [64]); print(((q * k).sum(1) / 8).abs().max())"`: however long the vectors, no score exceeds 1.44 · 64 / 8 =
11.52.
Source:
- Henry et al. 2020, "Query-Key Normalization": https://arxiv.org/abs/2010.04245
- Dehghani et al. 2023, ViT-22B: https://arxiv.org/abs/2302.05442
"""

qk_norm = True
