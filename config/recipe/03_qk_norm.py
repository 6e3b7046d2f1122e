"""Queries and keys are normalized, so that attention cannot saturate.

What: RMSNorm without a gain on each head's queries and keys, times 1.2, before the rotation.
Why: scores are bounded, so training is stable at higher learning rates.
Cost: an elementwise pass over queries and keys.
Source:
- Henry et al. 2020, "Query-Key Normalization": https://arxiv.org/abs/2010.04245
- Dehghani et al. 2023, ViT-22B: https://arxiv.org/abs/2302.05442
"""

qk_norm = True
