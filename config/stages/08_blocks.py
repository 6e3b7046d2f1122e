"""On a CPU, blocks of queries are multiplied only by visible keys.

What: a few heads at a time, each block of queries is multiplied only by the keys up to its end, with PyTorch's own
matrix products; the scores stay in the cache, and the probabilities are kept for the backward. `auto` chooses blocks on
a CPU in bfloat16 and, with a context of 256 to 1024 tokens, in float32; elsewhere `sdpa`, as before.
Why: on a CPU the fused kernel reaches a sixth of the rate of matrix products in bfloat16, and half of it in float32.
Cost: a little more than half of the (T, T) matrix is stored again. On a GPU, or with dropout, nothing changes.
Tried: we reused one buffer for all scores (153 ms instead of 147, in float32) and cut blocks of 64 queries (88 ms
instead of 81, in bfloat16).
Try: `python profile.py config/quickstart.py --context_length=512 --batch_size=4 --vary attention=matmul,sdpa,blocks
--minutes=2`: sdpa needs the least memory; which is fastest depends on the processor.
Source:
- Dao et al. 2022, "FlashAttention", on tiles: https://arxiv.org/abs/2205.14135
- torch.bmm, the product of many matrices in one call: https://docs.pytorch.org/docs/stable/generated/torch.bmm.html
"""

attention = "auto"
