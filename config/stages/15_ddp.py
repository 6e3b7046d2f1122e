"""One process for each device: every one holds the model and trains on its share of the batch.

What: `torchrun --standalone --nproc_per_node=N train.py ...` starts N processes; `DistributedDataParallel` averages
their gradients, once a step, bucket by bucket while the backward still runs. Alone, it changes nothing.
Why: N devices do N times the work, if the reduction hides behind the backward.
Cost: every process sends and receives about 8 bytes a parameter each step, and holds all of the model's state.
Source:
- Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training":
  https://arxiv.org/abs/2006.15704
- torch.nn.parallel.DistributedDataParallel:
  https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

ddp = True
