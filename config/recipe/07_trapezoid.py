"""The learning rate stays at its peak for half of the run, then falls linearly.

What: warmup, constant, and over the second half linear to min_lr.
Why: a higher mean rate for as long; the length of a run may be chosen late.
Cost: none.
Source:
- Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations":
  https://arxiv.org/abs/2405.18392
"""

schedule = "trapezoid"
