"""Tuned for AMD EPYC, 2 threads, native bfloat16: 1.36× (1.31–1.39) as fast as the finished loop.

Tuned 1290 ms a step, finished 1767 ms, in 8 rounds after the search. Changes tried: 14, in 9.3 minutes; torch
2.13.0+cpu, Python 3.11.7.
Written by: python profile.py config/reference.py --device=cpu --mode=tune
To be used: python train.py config/reference.py --device=cpu results/amd-epyc-2-threads-bf16/reference/tuned.py
"""

attention = "blocks"  # 1.10× (1.07–1.18) the speed of the best before
