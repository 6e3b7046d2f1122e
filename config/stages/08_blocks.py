"""On a CPU, blocks of queries meet only the keys that they may see.

What: a few heads at a time, each block of queries is multiplied only by the keys before its end, with PyTorch's own
matrix products; the scores stay in the cache, and the probabilities are kept for the backward. `auto` takes blocks on
a CPU in bfloat16 and, with a context of 256 to 1024 tokens, in float32; elsewhere `sdpa`, as before.
Why: the fused kernel of a CPU reaches a sixth of the rate of its matrix products in bfloat16, and half in float32.
Cost: little more than half of the (T, T) matrix is in memory again. On a GPU, or with dropout, nothing changes.
Tried: we reused one buffer for all scores (153 ms in place of 147, in float32) and cut blocks of 64 queries (88 ms in
place of 81, in bfloat16).
Source:
- Dao et al. 2022, "FlashAttention", on tiles: https://arxiv.org/abs/2205.14135
- torch.bmm, the product of many matrices in one call: https://docs.pytorch.org/docs/stable/generated/torch.bmm.html
"""

attention = "auto"
