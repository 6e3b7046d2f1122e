"""Updates that are skipped because the loss or a gradient is not finite."""

import torch


def may_update(optimizer, number):
    """True if the optimizer may take its next step: the number (), from the loss and the gradients, is finite.

    True without waiting for a GPU if the optimizer is fused, as its kernel then skips the update itself, and if the
    number is on a GPU: any other optimizer updates there, and the run ends before it saves.
    """
    finite = torch.isfinite(number)
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = (~finite).float()  # read by the fused kernel, as with GradScaler
        return True
    return number.device.type != "cpu" or bool(finite.item())
