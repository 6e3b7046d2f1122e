"""Skips updates whose loss or gradients are not finite."""

import torch


def may_update(optimizer, number):
    """False if the host knows that the number (), from the loss and the gradients, is not finite.

    True for a fused optimizer, whose kernel skips the update itself, and for a number on a GPU, for which nobody waits:
    any other optimizer updates there, and the run ends before it saves.
    """
    finite = torch.isfinite(number)
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = (~finite).float()  # read by the fused kernel, as with GradScaler
        return True
    return number.device.type != "cpu" or bool(finite.item())
