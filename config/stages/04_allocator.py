"""Freed memory is kept for the next step instead of going back to the system and being fetched again.

What: on a CPU, glibc's `mallopt`: never use mmap for large blocks, never trim the heap. On CUDA, where PyTorch
keeps freed memory anyway, expandable segments, which waste less of it between blocks.
Why: glibc maps every block above 32 MB afresh, and the kernel zeroes it page by page on first touch: in a model
whose activations are that large, each step pays for them again.
Cost: the process holds its peak until it ends. Another C library than glibc: nothing happens, and the header says so.
Source:
- mallopt(3): https://man7.org/linux/man-pages/man3/mallopt.3.html
- PyTorch's notes on CUDA memory management, "expandable_segments": https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

keep_memory = True
