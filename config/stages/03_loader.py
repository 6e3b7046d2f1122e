"""Batches are prepared and on the device before they are needed.

What: `DataLoader` workers, pinned memory, and non-blocking copies, always one batch ahead.
Why: a batch that is cut in the loop adds its time to every step. A copy from pinned memory is only queued; for a
copy from pageable memory the host waits.
Cost: two more processes, and a few batches of host memory. On a CPU there is nothing to copy: `auto` takes no workers
there, because two would save a fraction of a millisecond a step and take their time from the cores that train.
Tried: two workers on a CPU were slower: with a model of 0.8 million parameters, they and compiling took a step from
23 ms to 25; on two cores they cost config/reference.py 5 to 7 %.
Try: `python train.py config/recipe_small.py --compile=False --max_steps=20 --eval_windows=16 --num_workers=2
--out_dir=out/loader`: the losses are those of `--num_workers=0`, because a batch depends on the seed and the step
alone.
Source:
- torch.utils.data: https://docs.pytorch.org/docs/stable/data.html
- PyTorch's guide to pin_memory and non_blocking: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

num_workers = "auto"
