"""Lion (Chen et al. 2023)."""

import torch

BETA2 = 0.99  # Chen et al. 2023, table 12


class Lion(torch.optim.Optimizer):
    """Updates by the sign of the averaged gradient (Chen et al. 2023, algorithm 2). State: one average per weight."""

    def __init__(self, groups, lr, betas):
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            gradients = [parameter.grad for parameter in parameters]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["mean"] = torch.zeros_like(parameter)
            means = [self.state[parameter]["mean"] for parameter in parameters]
            # Every operation is elementwise; torch 2.11 lacks some of them for lists of DTensors
            parameters, gradients, means = map(local, (parameters, gradients, means))
            beta1, beta2 = group["betas"]
            updates = torch._foreach_lerp(gradients, means, beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])
            torch._foreach_lerp_(means, gradients, 1 - beta2)


def local(tensors):
    """This process's shards of the tensors, or the tensors themselves."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
