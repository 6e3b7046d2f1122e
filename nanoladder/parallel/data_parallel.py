"""Data parallelism: every process trains a replica of the model on its share of each batch."""

from collections.abc import Iterator
from typing import Any

import torch

from nanoladder.parallel.context import positions
from nanoladder.parallel.mesh import mesh
from nanoladder.private import OrderedDataParallel


def share(batches: Any) -> Any:
    """Returns this process's share of the batches, which have a method share(rank, world_size, positions, at_once).

    An evaluation passes as many micro-batches at once as a pipeline has processes, so that each works on one.
    """
    return batches.share(mesh().place.data, mesh().sizes.data, positions(batches.config), mesh().sizes.pipeline)


class DistributedDataParallel(OrderedDataParallel):
    """DDP that exposes the wrapped model's attributes and its state dict without a prefix."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict:
        return self.module.state_dict(*args, **kwargs)


def synchronize_last(model: torch.nn.Module, micro_batches: list) -> Iterator:
    """Yields the micro-batches. Only the last one's backward averages the gradients over all processes.

    Before, a process keeps whole gradients; if its weights are sharded too, they might not fit: then every backward
    reduces them to shards.
    """
    *others, last = micro_batches
    synchronize(model, False)
    yield from others
    synchronize(model, True)
    yield last


def synchronize(model, on):
    """Turns gradient averaging over processes on or off. Call it before the forward."""
    if mesh().averaging == 1:
        return
    if not hasattr(model, "set_requires_gradient_sync"):  # DDP
        model.require_backward_grad_sync = on
    elif model.config.shard in ("full", "hybrid"):
        model.set_requires_all_reduce(on)  # of shards, between the copies of the weights that hybrid keeps
    else:
        model.set_requires_gradient_sync(on)
        model.set_reshard_after_backward(on or model.config.shard != "optimizer")
