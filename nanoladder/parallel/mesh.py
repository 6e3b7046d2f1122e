"""The mesh: the processes as a grid of pipeline stages × data × context × tensor parallelism.

Ranks vary fastest within a tensor group, then along context, data and pipeline. So the groups that exchange most have
neighboring ranks, within a node.
"""

from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nanoladder.arithmetic import Grid


class Mesh:
    """The mesh of this run. sizes: the processes along each dimension; place: this process's index along each.

    n_sharing: processes that hold one copy of their weights among them (shard); the others hold further copies. They
    are neighbors along data and context, whose processes all average their gradients.
    """

    def __init__(self, sizes, rank=0, n_sharing=1, device_type="cpu"):
        self.sizes, self.n_sharing, self.device_type = sizes, n_sharing, device_type
        self.place = Grid(*(int(index) for index in np.unravel_index(rank, sizes)))

    @property
    def averaging(self):
        """Number of processes that average their gradients, along data and context."""
        return self.sizes.data * self.sizes.context

    @property
    def copy_and_shard(self):
        """(index of this process's copy of the weights, index of its shards in that copy)."""
        return divmod(self.place.data * self.sizes.context + self.place.context, self.n_sharing)

    @property
    def is_divided(self):
        """True if several processes hold the model's weights among them, so that none holds all."""
        return self.sizes.pipeline * self.sizes.tensor * self.n_sharing > 1

    @cached_property
    def weights(self):
        """DeviceMesh (pipeline, replicate, shard, tensor), on which the weights lie. Collective at first use."""
        copies = self.averaging // self.n_sharing
        shape = (self.sizes.pipeline, copies, self.n_sharing, self.sizes.tensor)
        names = ("pipeline", "replicate", "shard", "tensor")
        return dist.device_mesh.init_device_mesh(self.device_type, shape, mesh_dim_names=names)

    @cached_property
    def context(self):
        """DeviceMesh (context,) of the processes that share this one's sequences. Collective at first use."""
        shape = (self.sizes.pipeline * self.sizes.data, self.sizes.context, self.sizes.tensor)
        names = ("outer", "context", "tensor")
        return dist.device_mesh.init_device_mesh(self.device_type, shape, mesh_dim_names=names)["context"]

    @cached_property
    def holders(self):
        """DeviceMesh (holders,) of the processes that hold one copy of a stage's weights. Collective at first use."""
        shape = (self.sizes.pipeline * self.averaging // self.n_sharing, self.n_sharing * self.sizes.tensor)
        names = ("outer", "holders")
        return dist.device_mesh.init_device_mesh(self.device_type, shape, mesh_dim_names=names)["holders"]

    @cached_property
    def cpu_group(self) -> Any:
        """Group of all processes for data in host memory, with a timeout of an hour. Collective at first use."""
        return dist.new_group(backend="gloo", timeout=timedelta(hours=1))


current = Mesh(Grid())  # of one process


def mesh() -> Mesh:
    """The mesh made by set_mesh; before that, a mesh of one process."""
    return current


def set_mesh(sizes: Grid, rank: int, n_sharing: int, device_type: str) -> None:
    global current
    current = Mesh(sizes, rank, n_sharing, device_type)


def local(tensor: Any) -> torch.Tensor:
    """This process's part of a tensor, or the tensor itself if it is whole."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
