"""The mesh: the processes as a grid of pipeline stages × data × context × tensor parallelism.

Ranks count the processes of a tensor group first, then those of a context group, then data, then the pipeline. So the
groups that exchange most have neighboring ranks, within a node.
"""

import math
from datetime import timedelta
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from nanoladder.errors import BadInput

CUTS = ("pipeline_parallel", "context_parallel", "tensor_parallel")  # keys of the dimensions; data is what they leave


class Grid(NamedTuple):
    """Processes along each dimension of the mesh, or the place of one process in it."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1

    def __str__(self):
        """2 data × 4 tensor: every dimension of more than one process."""
        names = ("data", "pipeline", "context", "tensor")
        return " × ".join(f"{getattr(self, name)} {name}" for name in names if getattr(self, name) > 1)


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
        """Number of processes that average their gradients: those along data and context."""
        return self.sizes.data * self.sizes.context

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
    def cpu_group(self):
        """Group of all processes for data in host memory, with a timeout of an hour. Collective at first use."""
        return dist.new_group(backend="gloo", timeout=timedelta(hours=1))


current = Mesh(Grid())  # of one process


def mesh():
    """The mesh made by start_mesh; before that, a mesh of one process."""
    return current


def start_mesh(sizes, rank, n_sharing, device_type):
    global current
    current = Mesh(sizes, rank, n_sharing, device_type)


def local(tensor):
    """This process's part of a tensor, or the tensor itself if it is whole."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def divide(config, n):
    """Returns the Grid of n processes: the other dimensions determine data. Raises BadInput if they do not divide n."""
    pipeline, context, tensor = config.pipeline_parallel, config.context_parallel, config.tensor_parallel
    product = pipeline * context * tensor
    if n == 1:
        return Grid()  # one process has every part
    if n % product:
        keys = " × ".join(f"{key}={getattr(config, key)}" for key in CUTS if getattr(config, key) > 1)
        raise BadInput(f"{keys} does not divide {n} processes; expected a multiple of {product} (--nproc_per_node)")
    return Grid(pipeline, n // product, context, tensor)


def count_sharing(config, sizes, n_per_node):
    """Number of processes that hold one copy of their weights among them: a Mesh's n_sharing."""
    averaging = sizes.data * sizes.context
    if config.shard == "none":
        return 1
    if config.shard == "hybrid":
        return math.gcd(max(1, n_per_node // sizes.tensor), averaging)
    return averaging
