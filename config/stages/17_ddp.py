"""Each device holds the model, and trains on its share of the batch.

Stands on: cuda_graph
What: `torchrun --standalone --nproc_per_node=N train.py ...` starts N processes. `DistributedDataParallel` averages
their gradients once a step, bucket by bucket, while the backward is still running. One process alone is unchanged.
Why: N devices do N times the work, if the all-reduce hides behind the backward.
Cost: in each step every process sends and receives about 8 bytes per parameter, and it holds the whole model, its
gradients and its optimizer state.
Tried: we let DDP rebuild its buckets after the first step, as it does by default, and four processes no longer resumed
bit for bit; so it now gets the final order at the start.
Try: `torchrun --standalone --nproc_per_node=2 train.py config/recipe_small.py --compile=False --max_steps=20
--eval_windows=16 --out_dir=out/ddp`: two processes, and the losses of one.
Source:
- Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training":
  https://arxiv.org/abs/2006.15704
- torch.nn.parallel.DistributedDataParallel:
  https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

ddp = True
