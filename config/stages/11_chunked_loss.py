"""Head and loss run in chunks of the tokens: the logits of a batch never exist as a whole.

What: for each chunk: logits, loss, and at once the gradients of hidden states and head; then the chunk is freed.
Why: logits, log-probabilities and their gradient are B · T · V numbers each, in float32: with 50257 tokens by far
the largest tensors of a small model.
Cost: the head's gradient is kept from forward to backward, and the products are smaller. Where the vocabulary is
small, nothing is gained. `F.linear_cross_entropy` of PyTorch 2.13 does the same; in bfloat16 it rounds the sum of
the loss to bfloat16 (8.69 for 9.32 with 50304 tokens), so it is not used.
Source:
- Wijmans et al. 2024, "Cut Your Losses": https://arxiv.org/abs/2411.09009
- Hsu et al. 2024, "Liger Kernel": https://arxiv.org/abs/2410.10989
"""

loss_chunks = 8
