"""Freed memory is kept for the next step, not returned to the system.

What: on a CPU, glibc's `mallopt`: no mmap for large blocks, and no trimming of the heap. On CUDA, where PyTorch
keeps freed memory anyway, expandable segments, which lose less memory to fragmentation.
Why: glibc maps every block above 32 MB afresh, and the kernel zeroes its pages on first touch. A model whose
activations are that large pays for this in every step.
Cost: the process holds its peak memory until it ends. With a C library other than glibc nothing happens, and
the header says so.
Tried: we also asked PyTorch for huge pages (THP_MEM_ALLOC_ENABLE): 1291 ms a step with them, 1292 without, and they
took more memory.
Try: `python profile.py config/quickstart.py --vary keep_memory=True,False --minutes=2`: on Linux a step is slower if
memory is returned.
Source:
- mallopt(3): https://man7.org/linux/man-pages/man3/mallopt.3.html
- PyTorch's notes on CUDA memory management, "expandable_segments": https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

keep_memory = True
