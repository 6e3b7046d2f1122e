"""The loss stays on the device until it is logged: one wait every log_interval steps instead of one a step.

What: losses are added up on the device; the host reads the sum when a row is logged.
Why: `.item()` makes the host wait for the device. While it waits it cannot queue the next step, and the device
then idles until the first kernels of that step arrive.
Cost: none. A CPU is its own host: nothing runs ahead there, so nothing is gained.
Source:
- PyTorch's performance tuning guide, "Avoid unnecessary CPU-GPU synchronization":
  https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
"""

lazy_metrics = True
