"""A batch is run in micro-batches whose gradients add up: its size no longer depends on the memory.

What: forward and backward of a part of the batch at a time, one update for all of it. Each part's summed loss is
divided by the number of valid tokens of the whole batch, so padding and the cut change nothing.
Why: activations grow with what runs at once, not with the batch of the update.
Cost: smaller products, which fill a large GPU less; on a CPU they fit its caches better and can be faster.
Source:
- Ott et al. 2018, "Scaling Neural Machine Translation": https://arxiv.org/abs/1806.00187
- Hugging Face 2024, "Fixing Gradient Accumulation", the error of averaging means:
  https://huggingface.co/blog/gradient_accumulation
"""

micro_batch_size = batch_size // 4
