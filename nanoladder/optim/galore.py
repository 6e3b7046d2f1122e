"""GaLore."""

import torch

RANK = 1 / 4  # of a matrix's smaller side; Zhao et al. 2024 take a quarter to a half
GAP = 200  # steps between new subspaces
SCALE = 1.0  # of the update; the paper's 0.25 goes with a learning rate about four times AdamW's


class GaLore(torch.optim.Optimizer):
    """AdamW in the subspace of a matrix's largest singular vectors (Zhao et al. 2024, algorithm 2). Experimental.

    The state of a matrix (m, n), m <= n, is the basis (m, r) and two averages (r, n); if m > n, of its transpose.
    """

    def __init__(self, groups, lr, betas):
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def update(self, parameter, group):
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        wide = parameter.shape[0] <= parameter.shape[1]
        weight, gradient = (parameter, parameter.grad) if wide else (parameter.T, parameter.grad.T)  # (m, n), m <= n
        step = state["step"] = state.get("step", 0) + 1
        if step % GAP == 1:
            rank = max(1, round(RANK * len(gradient)))
            finite = gradient.nan_to_num()  # a GPU takes such a step anyway; run/faults.py names it
            left, _, _ = torch.linalg.svd(finite, full_matrices=False)
            state["basis"] = left[:, :rank].clone()  # (m, r); the rest of left is freed
        projected = state["basis"].T @ gradient  # (r, n)
        if step == 1:
            state["mean"], state["square"] = torch.zeros_like(projected), torch.zeros_like(projected)
        mean = state["mean"].lerp_(projected, 1 - beta1)
        square = state["square"].mul_(beta2).addcmul_(projected, projected, value=1 - beta2)
        scale = (square / (1 - beta2**step)).sqrt_().add_(1e-8)
        update = mean / (1 - beta1**step) / scale
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(state["basis"] @ update, alpha=-group["lr"] * SCALE)
