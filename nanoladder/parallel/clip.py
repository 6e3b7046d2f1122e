"""Clipping of gradients by the norm of the whole, however it is cut."""

from torch.nn import utils

from nanoladder.parallel.mesh import mesh
from nanoladder.parallel.shards import full_tensor


def clip_grad_norm_(model, max_norm):
    """Clips the gradients in place. Returns their norm () before, that of the whole model. Collective."""
    # With foreach, torch 2.11 leaves what tensor parallelism does not cut unclipped
    foreach = False if mesh().sizes.tensor > 1 else None
    return full_tensor(utils.clip_grad_norm_(model.parameters(), max_norm, foreach=foreach))
