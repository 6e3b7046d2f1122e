"""The head and the loss run in chunks of the tokens: the logits of a whole batch never exist at once.

What: for each chunk the logits, the loss, and at once the gradients of hidden states and head; then the chunk is
freed.
Why: logits, log-probabilities and their gradient are B · T · V numbers each, in float32: with 50257 tokens by far
the largest tensors of a small model.
Cost: the gradient of the head is kept from forward to backward, and the matrix products are smaller. A small
vocabulary gains nothing. `F.linear_cross_entropy` of PyTorch 2.13 does the same, but in bfloat16 it also rounds the
sum of the loss to bfloat16 (8.69 for 9.32 with 50304 tokens), so it is not used.
Source:
- Wijmans et al. 2024, "Cut Your Losses": https://arxiv.org/abs/2411.09009
- Hsu et al. 2024, "Liger Kernel": https://arxiv.org/abs/2410.10989
"""

loss_chunks = 8
