"""Skips updates whose loss or gradients are not finite."""

import torch


def step_if_finite(optimizer, number):
    """Updates the weights, unless the number (), a sum of loss and gradient norm, is not finite.

    A fused optimizer reads the number in its own kernel. For any other optimizer the host would have to wait for it. On
    a GPU it does not: the weights are updated, and the run ends before it saves. It does wait if float16 may overflow,
    which happens occasionally, and on mps, where PyTorch's fused kernel ignores found_inf
    (https://github.com/pytorch/pytorch/pull/186360).
    """
    finite, device = torch.isfinite(number), number.device.type
    if optimizer.defaults.get("fused") and device != "mps":
        optimizer.found_inf = (~finite).float()  # as GradScaler does
    elif (device != "cuda" or getattr(optimizer, "overflows", False)) and not finite.item():
        return
    optimizer.step()
