"""Tuned for AMD EPYC, 2 threads, native bfloat16: 1.15× (1.12–1.17) as fast as the finished loop.

Tuned 2565 ms a step, finished 2957 ms, in 8 rounds after the search. Changes tried: 6, in 7.5 minutes; torch
2.13.0+cpu, Python 3.11.7.
Written by: python profile.py config/reference.py --dtype=float32 --device=cpu --mode=tune
To be used: python train.py config/reference.py --dtype=float32 --device=cpu results/amd-epyc-2-threads-bf16/reference-float32/tuned.py
"""

attention = "blocks"  # 1.13× (1.08–1.19) the speed of the best before
