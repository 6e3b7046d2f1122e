"""Muon (Jordan et al. 2024)."""

import math
from collections import defaultdict
from functools import partial

import torch

from nanoladder import machine, parallel
from nanoladder.config import Config
from nanoladder.optim.groups import WithAdamW, hidden_and_rest
from nanoladder.parallel.mesh import mesh

# Momentum at first, and after this many steps, as in modded-nanogpt. A run shorter than WARMUP ends below MOMENTUM,
# which lowers its loss.
FIRST_MOMENTUM, MOMENTUM, WARMUP = 0.85, 0.95, 300
SIZE = 0.2  # RMS of an update, as AdamW's usually is (Liu et al. 2025)
# Coefficients of each iteration. Jordan et al. 2024: small singular values grow fast, all end near 1
NEWTON_SCHULZ = [(3.4445, -4.7750, 2.0315)] * 5
# Amsel et al. 2025, "The Polar Express": each the best for its input's singular values, from 1e-3 to 1.02
POLAR_EXPRESS = [
    (7.99662, -21.18651, 14.38189),
    (4.04293, -2.80892, 0.50002),
    (3.89167, -2.77248, 0.50606),
    (3.28575, -2.36813, 0.46449),
]
AT_ONCE = 2**25  # numbers of one batched product; a larger matrix keeps a GPU busy by itself


def build_muon(groups: list[dict], model: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    """Builds Muon for the matrices of the blocks, and AdamW for the rest, with one learning rate.

    groups: parameter groups, the decayed matrices first.
    """
    hidden, rest = hidden_and_rest(groups, model)
    preferred = machine.choose_dtype(config.dtype, hidden[0]["params"][0].device)
    dtype = preferred if preferred == torch.bfloat16 else torch.float32  # float16 lacks the range
    muon = Muon(hidden, config, dtype)
    if config.split_qkv:
        muon.split = {block.attention.qkv.weight for block in model.blocks.children()}
    return WithAdamW(muon, rest, config)


class Muon(torch.optim.Optimizer):
    """Moves matrices by their momentum, orthogonalized (Jordan et al. 2024). State: one average per weight.

    dtype: the matrix products'. With split_qkv, `split` is the set of weights that hold the matrices of queries, keys
    and values, whose shape no other weight has.
    """

    def __init__(self, groups, config, dtype):
        super().__init__(groups, {"lr": config.learning_rate})
        self.config, self.dtype = config, dtype
        self.coefficients = POLAR_EXPRESS if config.polar_express else NEWTON_SCHULZ

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            alike, first = defaultdict(list), 0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                n = parallel.in_all_holders(max(1, AT_ONCE // shape.numel()))
                for start in range(0, len(parameters), n):
                    self.update(parameters[start : start + n], group, first + start)
                first += len(parameters)

    def update(self, parameters, group, first):
        """Updates matrices of one shape together; `first` of the group's were updated before them."""
        directions = [self.momentum(parameter) for parameter in parameters]
        rows, columns = parameters[0].shape
        function = partial(orthogonalize, self.coefficients)
        if self.config.split_qkv and parameters[0] in self.split:
            function, rows = partial(orthogonalize_thirds, self.coefficients), rows // 3
        directions = parallel.map_matrices(function, directions, parameters[0], first)
        lr, size = group["lr"], SIZE * math.sqrt(max(rows, columns))  # singular values of 1: an RMS of 1 / √max
        for parameter, direction in zip(parameters, directions, strict=True):
            parallel.local(parameter).mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-(lr * size))

    def momentum(self, parameter):
        """Nesterov's: the average of the gradients, moved once more towards this step's.

        It spans more of them as training goes on: at first gradients change fast, and old ones are out of date.
        """
        state = self.state[parameter]
        if "step" not in state:
            state["step"], state["momentum_buffer"] = torch.tensor(0.0), torch.zeros_like(parameter)
        state["step"] += 1  # on the CPU, as AdamW's
        missing = max(0.0, 1 - state["step"].item() / WARMUP)
        momentum = MOMENTUM - missing * (MOMENTUM - FIRST_MOMENTUM)
        # Elementwise, so each process computes on its own shards
        gradient, average = parallel.local(parameter.grad), parallel.local(state["momentum_buffer"])
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum).to(self.dtype)


def orthogonalize(coefficients, matrices):
    """Newton-Schulz (Jordan et al. 2024): the same singular vectors, all singular values about 1. (n, rows, columns).

    Each iteration, with its coefficients (a, b, c), maps a singular value s to a s + b s³ + c s⁵.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # wide, so that x xᵀ is the smaller product
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)  # singular values of at most 1
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalize_thirds(coefficients, matrices):
    """Orthogonalizes the query, key and value matrices separately. (n, 3C, C)."""
    n_tensor = mesh().sizes.tensor  # processes whose heads' rows follow each other: q k v of each
    thirds = matrices.unflatten(1, (n_tensor, 3, -1)).transpose(1, 2).flatten(2, 3)  # (n, 3, C, C)
    thirds = orthogonalize(coefficients, thirds.flatten(0, 1)).unflatten(0, (-1, 3))
    return thirds.unflatten(2, (n_tensor, -1)).transpose(1, 2).flatten(1, 3)
