"""Skips updates whose loss or gradients are not finite."""

import torch


def check_finite(
    optimizer: torch.optim.Optimizer, number: torch.Tensor, scaler: torch.amp.GradScaler | None = None
) -> bool:
    """True unless the number (), a sum of loss and gradient norm, is found not to be finite before the update.

    The host would have to wait for the number. It does not for a fused optimizer, which reads it in its own kernel; nor
    on a GPU: the weights are then updated, and the run ends before it saves. It does wait if float16 may overflow,
    which happens occasionally, and on mps, where PyTorch's fused kernel ignores found_inf
    (https://github.com/pytorch/pytorch/pull/186360).
    """
    overflows, device = scaler is not None and scaler.is_enabled(), number.device.type
    if optimizer.defaults.get("fused") and device != "mps" and not overflows:
        optimizer.found_inf = (~torch.isfinite(number)).float()  # as GradScaler does
        return True
    return (device == "cuda" and not overflows) or bool(torch.isfinite(number).item())
