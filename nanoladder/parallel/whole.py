"""Conversions between whole tensors and the parts of them that each process holds.

A weight may be sharded, cut by tensor parallelism, and on one stage of a pipeline alone. A checkpoint holds whole ones.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from nanoladder.parallel.group import rank
from nanoladder.parallel.mesh import mesh
from nanoladder.parallel.pipeline import TIED
from nanoladder.parallel.tensor import by_process, is_reordered


def full_tensor(tensor):
    """Returns the whole tensor, gathered if it is sharded. Collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gather_state(state):
    """Copies {weight's name: tensor or its state} to rank 0's CPU; other ranks get None for tensors.

    Gathers what is sharded or cut, and the weights of all stages of a pipeline. Collective.
    """
    if mesh().place.pipeline > 0:
        return send_state(state)
    copies = {}  # {id: copy}, so that tied tensors are copied once

    def copy(name, tensor):
        if id(tensor) not in copies:
            whole = whole_tensor(name, tensor)  # only one whole tensor is on the device at a time
            copies[id(tensor)] = whole.to("cpu", copy=True) if rank() == 0 else None
        return copies[id(tensor)]

    gathered = map_tensors(copy, state)
    if rank() == 0:
        for place in range(1, mesh().sizes.pipeline):
            gathered |= receive_state(place)
    return gathered


def whole_tensor(name, tensor):
    """The whole tensor, gathered, of the named weight or of its optimizer state. Collective."""
    whole = full_tensor(tensor.detach())
    return by_process(whole, back=True) if is_reordered(name, tensor) else whole


def map_tensors(function, state):
    """{name: value} with function(name, tensor) in place of every tensor in a value."""
    return {name: tree_map_only(torch.Tensor, partial(function, name), value) for name, value in state.items()}


def send_state(state):
    """Sends the state of a later process of a pipeline to rank 0, each tensor whole. Returns it with None for tensors.

    The first of the processes with the same stages sends; the others help to gather.
    """
    state = {name: values for name, values in state.items() if name != TIED}  # rank 0 has that
    sends, group = not any(mesh().place[1:]), mesh().weights["pipeline"].get_group()

    def send(name, tensor):
        whole = whole_tensor(name, tensor)
        if sends:
            dist.send(whole.to(mesh().device_type).contiguous(), group=group, group_dst=0)

    if sends:
        shapes = tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), state)
        dist.send_object_list([shapes], group=group, group_dst=0)
    return map_tensors(send, state)


def receive_state(place):
    """Receives what send_state() sends from a place of the pipeline, on the CPU."""
    group, shapes = mesh().weights["pipeline"].get_group(), [None]

    def receive(like):
        whole = torch.empty_like(like, device=mesh().device_type)
        dist.recv(whole, group=group, group_src=place)
        return whole.cpu()

    dist.recv_object_list(shapes, group=group, group_src=place)
    return tree_map_only(torch.Tensor, receive, shapes[0])


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
