"""Lion (Chen et al. 2023)."""

import torch

from nanoladder import parallel

BETAS = (0.9, 0.99)  # Chen et al. 2023, table 12


class Lion(torch.optim.Optimizer):
    """Updates by the sign of the averaged gradient (Chen et al. 2023, algorithm 2). State: one average per weight."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "betas": BETAS})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter]["mean"] = torch.zeros_like(parameter)
                # Every operation is elementwise, so each process computes on its own shards
                weight, gradient, mean = map(parallel.local, (parameter, parameter.grad, self.state[parameter]["mean"]))
                update = gradient.lerp(mean, beta1).sign_()
                weight.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)
                mean.lerp_(gradient, 1 - beta2)
