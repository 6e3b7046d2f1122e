"""One fused kernel computes attention; no (T, T) matrix is stored.

What: `F.scaled_dot_product_attention` with `is_causal`, which also skips the masked half. With sdpa PyTorch picks
the kernel, and the header says which; flash and cudnn force one of them, for comparison.
Why: scores, mask, softmax and dropout are five passes over B · nh · T² numbers, which are kept for the backward.
The fused kernel holds a tile in fast memory and recomputes it: memory grows with T, not with T².
Cost: sums are taken in another order. The fused CPU kernel has no dropout: with dropout the matrix is stored again.
Tried: on an EPYC with bfloat16 it was slower: 1982 ms a step with the fused kernel, 1716 with the matrix; hence the
next stage.
Try: `python profile.py config/gpt2.py --mode=predict --gpu=H100 --vocab_size=50257 --batch_size=8 --micro_batch_size=0
--stages=amp,flash`: the (T, T) matrices leave the memory; with twice the `--context_length` twice as much remains,
where amp needs four times as much for them.
Source:
- Dao et al. 2022, "FlashAttention": https://arxiv.org/abs/2205.14135
- Rabe & Staats 2021, on attention without quadratic memory: https://arxiv.org/abs/2112.05682
- torch.nn.functional.scaled_dot_product_attention:
  https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

attention = "sdpa"
