"""Each process holds only its share of weights, gradients and optimizer state.

What: FSDP2, `fully_shard` on every block. full: a block's weights are gathered before its forward and its backward
and dropped again. optimizer: they are gathered once a step and only gradients and optimizer state are shares (ZeRO).
Why: the 16 bytes a parameter of weight, gradient and AdamW's state become 16 / N: what one device cannot hold, N can.
Cost: at most half as many bytes again as ddp sends; full gathers once more for every micro-batch. The model is
compiled block by block. Alone, in one process, nothing is shared.
Source:
- Rajbhandari et al. 2020, "ZeRO": https://arxiv.org/abs/1910.02054
- Zhao et al. 2023, "PyTorch FSDP": https://arxiv.org/abs/2304.11277
- torch.distributed.fsdp.fully_shard: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

shard = "full"
