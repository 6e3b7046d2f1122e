"""Data parallelism: every process holds the model and trains on its share of each batch."""

from torch import nn

from nanoladder.parallel.group import rank, world_size


def share(batches):
    """This process's share of every batch."""
    return batches.share(rank(), world_size())


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """DDP (Li et al. 2020) that passes on the attributes of the model it wraps, and its plain weight names."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.broadcast_buffers = False  # constants

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
    """Yields the micro-batches; only the backward of the last one averages the gradients over the processes."""
    *others, last = micro_batches
    synchronize(model, False)
    yield from others
    synchronize(model, True)
    yield last


def synchronize(model, on):
    """Switches, before a forward, if its backward averages the gradients over the processes."""
    if world_size() == 1:
        return
    if model.config.shard == "none":
        model.require_backward_grad_sync = on
    else:
        model.set_requires_gradient_sync(on)
        model.set_reshard_after_backward(on or model.config.shard == "full")
