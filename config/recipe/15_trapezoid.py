"""The learning rate stays at its peak, then falls linearly.

Stands on: smear

What: warmup, constant, and over the second half linear to min_lr.
Why: the mean rate is higher, and the length of the run can be decided late.
Cost: none.
Try: `python -c "import train; c = train.Config(schedule='trapezoid', max_steps=10, warmup_steps=2, learning_rate=1,
min_lr=0); print([round(train.learning_rate(n, c), 2) for n in range(1, 11)])"` prints the ten learning rates: up,
constant, down.
Source:
- Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations":
  https://arxiv.org/abs/2405.18392
"""

schedule = "trapezoid"
