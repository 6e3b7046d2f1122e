"""The loss stays on the device until it is logged.

What: losses are summed on the device, and the host reads the sum when it logs a row.
Why: `.item()` makes the host wait for the device. Meanwhile the host cannot queue the next step, and the device
then idles until the first kernels of that step arrive.
Cost: none. On a CPU nothing is gained: host and device are the same, and nothing runs ahead.
Tried: we wanted to skip the update after a non-finite loss without reading the loss. On a GPU, fused optimizers take it
as a flag; the others have already updated when the run stops.
Try: `python profile.py config/quickstart.py --stages=lazy_metrics --minutes=2`: no measurable change on a CPU; on a
GPU, host's share of a step shrinks.
Source:
- PyTorch's performance tuning guide, "Avoid unnecessary CPU-GPU synchronization":
  https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
"""

lazy_metrics = True
