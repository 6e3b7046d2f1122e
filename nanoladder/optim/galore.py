"""GaLore (Zhao et al. 2024)."""

import torch

RANK = 1 / 4  # rank as a fraction of a matrix's smaller side; the paper uses a quarter to a half
GAP = 200  # steps between subspace changes
SCALE = 1.0  # factor of the update; the paper's 0.25 goes with a learning rate about four times AdamW's


class GaLore(torch.optim.Optimizer):
    """AdamW in the subspace of the gradient's top singular vectors (Zhao et al. 2024, algorithm 2). Experimental.

    State of a matrix (m, n) with m <= n: the basis (m, r) and two moments (r, n). If m > n: the state of its transpose.
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
        state["step"] = state.get("step", torch.tensor(0.0)) + 1  # on the CPU, as AdamW's
        step = int(state["step"])
        if step % GAP == 1:
            rank = rank_of(len(gradient))
            finite = gradient.nan_to_num()  # SVD rejects NaN; run/faults.py reports such a step on a GPU later
            left, _, _ = torch.linalg.svd(finite, full_matrices=False)
            # (m, r), row-major as in a checkpoint: `left` is column-major, and its products may round differently
            state["basis"] = left[:, :rank].clone(memory_format=torch.contiguous_format)
        projected = state["basis"].T @ gradient  # (r, n)
        if step == 1:
            state["mean"], state["square"] = torch.zeros_like(projected), torch.zeros_like(projected)
        mean = state["mean"].lerp_(projected, 1 - beta1)
        square = state["square"].mul_(beta2).addcmul_(projected, projected, value=1 - beta2)
        scale = (square / (1 - beta2**step)).sqrt_().add_(1e-8)
        update = mean / (1 - beta1**step) / scale
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(state["basis"] @ update, alpha=-group["lr"] * SCALE)


def rank_of(m):
    """Rank of the subspace for matrices whose smaller side is m."""
    return max(1, round(RANK * m))
