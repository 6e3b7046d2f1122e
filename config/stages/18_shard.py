"""Weights, gradients and optimizer state are divided among processes.

Stands on: ddp
What: FSDP2, `fully_shard` on every block. full: the weights of a block are gathered before its forward and again
before its backward, and freed after each. optimizer: weights are gathered once a step, and only gradients and
optimizer state are sharded (ZeRO). hybrid: full within each node, replicated between nodes.
Why: the 16 bytes per parameter of weights, gradients and AdamW's state become 16 / N: N devices hold a model that is
too large for one.
Cost: at most one and a half times the bytes that ddp sends; full gathers and reduces for every micro-batch. The model
is compiled block by block. One process alone shards nothing.
Tried: before FSDP2 we used PyTorch's ZeroRedundancyOptimizer to shard optimizer state; after loading a checkpoint it
kept AdamW's step counters on the CPU.
Try: `torchrun --standalone --nproc_per_node=2 train.py config/recipe_small.py --compile=False --max_steps=20
--eval_windows=16 --shard=full --out_dir=out/shard`: the losses of one process, in less memory each.
Source:
- Rajbhandari et al. 2020, "ZeRO": https://arxiv.org/abs/1910.02054
- Zhao et al. 2023, "PyTorch FSDP": https://arxiv.org/abs/2304.11277
- torch.distributed.fsdp.fully_shard: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

shard = "full"
