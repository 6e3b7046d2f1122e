"""Head and loss run in chunks: the logits never exist all at once.

What: each chunk computes its logits, its loss and, immediately, the gradient, which overwrites the logits; the next
chunk reuses their memory. `auto`: chunks of eight tokens per channel, and none for 256 MB of logits or less.
Why: logits, log-probabilities and their gradient are B · T · V numbers each, in float32: with 50257 tokens by far
the largest tensors of a small model. On CUDA one Triton kernel reads the logits and writes the gradient. In
bfloat16, from Hopper on, even that pass is gone: the product itself writes exponentials, and dividing by their sums is
left to the hidden states and their gradient, which are much narrower. The operator is opaque to the compiler, which
would otherwise defer the products and keep all logits.
Cost: the gradient of the head is kept from forward to backward, and the matrix products are smaller. A small
vocabulary gains nothing. `F.linear_cross_entropy` of PyTorch 2.13 works in chunks, too, but cannot be compiled, and
took ten times as long on two cores of an EPYC (results/amd-epyc-2-threads-bf16/reference/losses.md).

A small model on a large GPU loses until the next stage. In an H200's step of the reference model the kernels take 5.1
ms instead of 6.5, but launching them one by one takes Python 11.9 ms instead of 8.6, for which the GPU waits; with
cuda_graph on top the step takes 4.8 ms. Without a graph chunks gain where the kernels take longer than their launches,
as in GPT-2 124M, whose step of 32 × 1,024 tokens takes 56 ms on the same GPU; at the limit of an H100 they are
predicted to gain 16 % there.

Tried: at first we left the chunks to the compiler, which unrolled them and kept all logits until their products: 464
MB, where the same code took 156 eagerly. On an H200, 2,048 × 50,304 logits took 97 µs in cuBLAS's product and 128 in
the softmax; with exponentials in its epilogue our product takes 127, and took 162 as one program a tile.
Try: `python profile.py config/gpt2.py --mode=predict --gpu=H100 --vocab_size=50257 --batch_size=32 --micro_batch_size=0
--stages=compile,chunked_loss`: the logits leave the memory.
Source:
- Wijmans et al. 2024, "Cut Your Losses": https://arxiv.org/abs/2411.09009
- Hsu et al. 2024, "Liger Kernel": https://arxiv.org/abs/2410.10989
"""

loss_chunks = "auto"
