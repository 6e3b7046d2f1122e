"""One fused kernel computes attention tile by tile: the (T, T) matrix of weights is never stored.

What: `F.scaled_dot_product_attention` with `is_causal`, which skips the masked half too. sdpa lets PyTorch choose
the kernel (the header says which); flash, cudnn and efficient force one, to compare them.
Why: scores, mask, softmax and dropout are five passes over B · nh · T² numbers, kept for the backward; the fused
kernel holds a tile in fast memory and recomputes it. Memory grows with T instead of T².
Cost: sums in another order. On a CPU the fused kernel has no dropout: with dropout the matrix comes back.
Source:
- Dao et al. 2022, "FlashAttention": https://arxiv.org/abs/2205.14135
- Rabe & Staats 2021, on attention without quadratic memory: https://arxiv.org/abs/2112.05682
- torch.nn.functional.scaled_dot_product_attention:
  https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

attention = "sdpa"
