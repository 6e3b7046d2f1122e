"""A batch runs as micro-batches, whose gradients add up.

Stands on: checkpointing
What: forward and backward for one part of the batch at a time, then one update for all of it. The summed loss of
each part is divided by the number of valid tokens in the whole batch, so that padding and cuts change nothing.
Why: activations grow with the sequences that run at once, not with the batch of the update.
Cost: smaller matrix products, which use a large GPU less well.
Tried: we hoped that smaller products would fit a CPU's caches and be faster, and could measure no change.
Try: `python train.py config/recipe_small.py --compile=False --max_steps=20 --eval_windows=16 --micro_batch_size=4
--out_dir=out/micro`: the losses are those of the whole batch.
Source:
- Ott et al. 2018, "Scaling Neural Machine Translation": https://arxiv.org/abs/1806.00187
- Hugging Face 2024, "Fixing Gradient Accumulation", the error of averaging means:
  https://huggingface.co/blog/gradient_accumulation
"""

micro_batch_size = batch_size // 4
