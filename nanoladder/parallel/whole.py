"""Conversions between whole tensors and the parts of them that each process holds.

A weight may be sharded, cut by tensor parallelism, and on one stage of a pipeline alone. A checkpoint holds whole ones.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn import utils

from nanoladder.parallel.group import rank, world_size
from nanoladder.parallel.mesh import mesh
from nanoladder.parallel.pipeline import COPY, TIED
from nanoladder.parallel.tensor import by_process, is_reordered
from nanoladder.private import tree_map_only


def full_tensor(tensor):
    """Returns the whole tensor, gathered if it is sharded. Collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clip_grad_norm_(model, max_norm):
    """Clips the gradients in place. Returns their norm () before, that of the whole model. Collective."""
    copy = COPY if mesh().sizes.pipeline > 1 else None
    counted = [p.grad for name, p in model.named_parameters() if p.grad is not None and name != copy]
    norm = full_tensor(utils.get_total_norm(counted))
    if mesh().sizes.pipeline > 1:
        square = norm.square()
        dist.all_reduce(square, group=mesh().weights["pipeline"].get_group())
        norm = square.sqrt()
    utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def gather_state(state):
    """Copies {weight's name: tensor or its state} to rank 0's CPU; other ranks get None for tensors.

    Gathers what is sharded or cut, and the weights of all stages of a pipeline. Collective.
    """
    keeps = not any(mesh().place[1:])  # the first of the processes with the same stages

    def copy(name, tensor):
        whole = full_tensor(tensor.detach())  # only one whole tensor is on the device at a time
        whole = by_process(whole, back=True) if is_reordered(name, tensor) else whole
        return whole.to("cpu", copy=True) if keeps else None

    gathered = {name: tree_map_only(torch.Tensor, partial(copy, name), value) for name, value in state.items()}
    return gathered if mesh().sizes.pipeline == 1 else join_stages(gathered, keeps)


def join_stages(state, sends):
    """Adds the other stages' state, sent by one process of each, to rank 0's. Returns the state. Collective."""
    n, hosts = world_size() // mesh().sizes.pipeline, mesh().hosts  # n processes a stage
    if sends and rank() > 0:
        state.pop(TIED, None)  # rank 0 has that
        dist.send_object_list([state], 0, hosts)
    for sender in range(n, world_size(), n) if rank() == 0 else ():
        received = [None]
        dist.recv_object_list(received, sender, hosts)
        state |= received[0]
    return state


def local_shard(tensor, like, name):
    """Shards a whole tensor as `like` if `like` is sharded and of the same shape; else returns the tensor.

    name: that of the weight, or of the weight whose optimizer state the tensor is.
    """
    if not hasattr(like, "placements") or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    if is_reordered(name, like):
        tensor = by_process(tensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def local_rows(tensor, like):
    """Returns this process's rows of a whole tensor if `like` is sharded, else the tensor."""
    if not hasattr(like, "placements"):
        return tensor
    return tensor.chunk(mesh().n_sharing)[like.device_mesh.get_coordinate()[-1]].clone()


def as_shards(tensors, like):
    """Wraps local tensors, with equally many rows in each process, as DTensors if `like` is sharded."""
    if not hasattr(like, "placements"):
        return tensors
    from torch.distributed.tensor import DTensor

    return [DTensor.from_local(tensor, like.device_mesh, like.placements) for tensor in tensors]
