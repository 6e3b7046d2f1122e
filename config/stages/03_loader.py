"""Batches are cut by worker processes and copied to the device before they are needed.

What: `DataLoader` workers, pinned memory, and copies that do not block, always one batch ahead.
Why: cut in the loop, a batch costs its time in every step. A copy from pinned memory is queued without a wait;
one from pageable memory makes the host wait for it.
Cost: two more processes, and a few batches of host memory. On a CPU nothing is copied, and a worker only takes
over a fraction of a millisecond a step.
Source:
- torch.utils.data: https://docs.pytorch.org/docs/stable/data.html
- PyTorch's guide to pin_memory and non_blocking: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

num_workers = 2
