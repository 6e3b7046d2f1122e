"""The learning rate stays at its peak, then falls linearly.

Stands on: smear

What: warmup, constant, and over the second half linear to min_lr.
Why: the mean rate is higher, and the length of the run can be decided late.
Cost: none.
Source:
- Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations":
  https://arxiv.org/abs/2405.18392
"""

schedule = "trapezoid"
