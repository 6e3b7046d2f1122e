"""Data parallelism: every process trains a replica of the model on its share of each batch."""

from torch import nn

from nanoladder.parallel.group import rank, world_size


def share(batches):
    """Returns this process's share of the batches, which have a method share(rank, world_size)."""
    return batches.share(rank(), world_size())


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """DDP (Li et al. 2020) that exposes the wrapped model's attributes and its state dict without a prefix."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.broadcast_buffers = False  # they are constants

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.module.load_state_dict(*args, **kwargs)


def synchronize_last(model, micro_batches):
    """Yields the micro-batches. Only the last one's backward averages the gradients over processes."""
    *others, last = micro_batches
    synchronize(model, False)
    yield from others
    synchronize(model, True)
    yield last


def synchronize(model, on):
    """Turns gradient averaging over processes on or off. Call it before the forward."""
    if world_size() == 1:
        return
    if model.config.shard == "none":
        model.require_backward_grad_sync = on
    else:
        model.set_requires_gradient_sync(on)
        model.set_reshard_after_backward(on or model.config.shard == "full")
