"""Optimizer updates during the backward pass."""

import torch

from nanoladder.optim.finite import check_finite


def update_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Makes the backward update each parameter when its gradient is ready, then free the gradient.

    The optimizer's state does not change (Lv et al. 2023). optimizer.norms collects the norm () of each gradient. From
    a backward's first non-finite gradient on, no parameter is updated (see check_finite); if the loss is not finite,
    the first gradient, that of the last layer, is not finite either.
    """
    optimizer.norms, optimizer.sum_of_norms = [], 0.0
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p, number=number: update_one(optimizer, number, p))


def update_one(optimizer, number, parameter):
    """Runs the optimizer's step on one parameter of group `number`."""
    norm = torch.linalg.vector_norm(parameter.grad)
    optimizer.norms.append(norm)
    optimizer.sum_of_norms += norm  # once it is not finite, it stays so
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[number], "params": [parameter]}]
    if check_finite(optimizer, optimizer.sum_of_norms):
        optimizer.step()
    optimizer.param_groups = groups
    parameter.grad = None


def norm_of_updates(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Global norm () of the gradients that arrived since the last call."""
    norm = torch.linalg.vector_norm(torch.stack(optimizer.norms))
    optimizer.norms, optimizer.sum_of_norms = [], 0.0
    return norm
