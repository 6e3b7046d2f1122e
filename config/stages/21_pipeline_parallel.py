"""Two processes share the blocks; micro-batches pass through in turn.

Stands on: ddp
What: `torch.distributed.pipelining`. The first stage embeds; the last has the norm, the head and the loss, and fewer
blocks in return, so that all stages do about the same arithmetic. While the second works on one micro-batch, the first
works on the next; a stage alternates between forward and backward (1F1B). Without a micro_batch_size, there are as many
micro-batches as processes.
Why: weights and their state are divided by depth, and only the activations between two blocks are sent: less than any
other way to divide a model, so it works between nodes.
Cost: the bubble, when stages wait for the first micro-batch or the last one: (p - 1) / (m + p - 1) of a step for p
stages and m micro-batches. The interleaved schedule halves it.
Tried: we also had the zero-bubble schedule and removed it: it splits every operator's backward in two, which the
chunked loss supports only from PyTorch 2.13 on.
Try: `torchrun --standalone --nproc_per_node=2 train.py config/recipe_small.py --compile=False --max_steps=20
--eval_windows=16 --pipeline_parallel=2 --micro_batch_size=4 --out_dir=out/pipeline`: the losses of one process; the
header predicts the bubble.
Source:
- Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters":
  https://arxiv.org/abs/2104.04473
- torch.distributed.pipelining: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

pipeline_parallel = 2
