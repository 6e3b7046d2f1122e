"""Optimizer updates during the backward pass."""

import torch


def update_in_backward(optimizer):
    """Makes the backward update each parameter when its gradient is ready, then free the gradient (Lv et al. 2023).

    The optimizer's state does not change. optimizer.norms collects the norm () of each gradient.
    """
    optimizer.norms = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(lambda p, number=number: update_one(optimizer, number, p))


def update_one(optimizer, number, parameter):
    """Runs the optimizer's step on one parameter of group `number`."""
    optimizer.norms.append(torch.linalg.vector_norm(parameter.grad))
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[number], "params": [parameter]}]
    optimizer.step()
    optimizer.param_groups = groups
    parameter.grad = None


def norm_of_updates(optimizer):
    """Global norm () of the gradients applied since the last call."""
    norm = torch.linalg.vector_norm(torch.stack(optimizer.norms))
    optimizer.norms.clear()
    return norm
