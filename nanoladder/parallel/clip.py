"""Clipping of gradients by the norm of the whole, however it is cut."""

import torch.distributed as dist
from torch.nn import utils

from nanoladder.parallel.mesh import mesh
from nanoladder.parallel.pipeline import COPY
from nanoladder.parallel.whole import full_tensor


def clip_grad_norm_(model, max_norm):
    """Clips the gradients in place. Returns their norm () before, that of the whole model. Collective."""
    counted = [p.grad for name, p in model.named_parameters() if p.grad is not None and name != COPY]
    norm = full_tensor(utils.get_total_norm(counted))
    if mesh().sizes.pipeline > 1:
        square = norm.square()
        dist.all_reduce(square, group=mesh().weights["pipeline"].get_group())
        norm = square.sqrt()
    utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
