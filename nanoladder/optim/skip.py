"""Skips updates whose loss or gradients are not finite."""

import torch


def may_update(optimizer, number):
    """False if the host knows that the number (), from the loss and the gradients, is not finite.

    True for a fused optimizer, whose kernel skips the update itself, and for a number on CUDA, for which nobody waits:
    any other optimizer updates there, and the run ends before it saves. On mps the host waits, because PyTorch's fused
    kernel ignores found_inf there (https://github.com/pytorch/pytorch/pull/186360).
    """
    finite, device = torch.isfinite(number), number.device.type
    if optimizer.defaults.get("fused") and device != "mps":
        optimizer.found_inf = (~finite).float()  # read by the fused kernel, as with GradScaler
        return True
    return device == "cuda" or bool(finite.item())
