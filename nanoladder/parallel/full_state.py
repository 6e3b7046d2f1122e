"""Conversions between whole tensors and each process's parts.

A weight may be sharded, cut by tensor parallelism, and on only one pipeline stage. A checkpoint holds whole weights.
"""

import functools
import math
import operator
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn import utils

from nanoladder.parallel.group import gather_objects, rank, world_size
from nanoladder.parallel.mesh import mesh
from nanoladder.parallel.pipeline import COPY
from nanoladder.parallel.tensor import by_process, is_reordered


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole tensor, gathered if it is sharded. Collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clip_grad_norm_(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
    """Clips the gradients in place. Returns the whole model's gradient norm () before clipping. Collective."""
    copy = COPY if mesh().sizes.pipeline > 1 else None
    counted = [p.grad for name, p in model.named_parameters() if p.grad is not None and name != copy]
    norm = full_tensor(utils.get_total_norm(counted))
    if mesh().sizes.pipeline > 1:
        square = norm.square()
        dist.all_reduce(square, group=mesh().weights["pipeline"].get_group())
        norm = square.sqrt()
    utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


class WholeTensors:
    """Whole tensors of {name: tensor or this process's part of it}, including all pipeline stages.

    Iterating yields (name, tensor) by name: a copy on rank 0's CPU, None in other processes. Only one whole tensor at a
    time is in memory. Collective, as is each iteration. shapes: {name: tensor without values}.
    """

    def __init__(self, parts: dict[str, torch.Tensor]) -> None:
        self.parts, self.is_first, self.shapes, self.senders = parts, is_first(), {}, {}
        facts = {name: (tensor.shape, tensor.dtype) for name, tensor in parts.items()} if self.is_first else {}
        for sender, received in enumerate(gather_objects(facts)):
            for name, (shape, dtype) in received.items():
                self.shapes.setdefault(name, torch.empty(shape, dtype=dtype, device="meta"))
                self.senders.setdefault(name, sender)

    def __iter__(self):
        n = world_size() // mesh().sizes.pipeline  # processes of a stage
        for name, sender in sorted(self.senders.items()):
            has_part = sender // n == mesh().place.pipeline
            whole = self.gather(name) if has_part else None
            yield name, whole if sender == 0 else send_to_first(whole, sender, self.shapes[name])

    def gather(self, name: str) -> torch.Tensor | None:
        tensor = self.parts[name]
        whole = full_tensor(tensor.detach())
        whole = by_process(whole, back=True) if is_reordered(name, tensor) else whole
        return whole.to("cpu", copy=True) if self.is_first else None


def send_to_first(tensor, sender, like):
    """Returns the sender's CPU tensor on rank 0, None elsewhere. like: a tensor of its shape and dtype. Collective."""
    cpu_group = mesh().cpu_group
    if rank() == sender:
        dist.send(tensor.contiguous(), 0, cpu_group)
    elif rank() == 0:
        dist.recv(received := torch.empty_like(like, device="cpu"), sender, cpu_group)
        return received
    return None


def merge_stages(state: dict) -> dict:
    """Merges {name: value}, in which every stage of a pipeline has values of its own. Collective."""
    return functools.reduce(operator.or_, reversed(gather_objects(state if is_first() else {})))  # rank 0's come first


def is_first():
    """True for the first of the processes that have the same pipeline stages."""
    return not any(mesh().place[1:])


def local_part(tensor: torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
    """Returns this process's slice of a whole tensor if `like` is cut and of the same shape; else the tensor.

    A view, unless rows are reordered. name: the weight's, or the name of the weight whose optimizer state this is.
    """
    if not hasattr(like, "placements") or tensor.shape != like.shape:
        return tensor
    if is_reordered(name, like):
        tensor = by_process(tensor)
    for i, placement in reversed([*enumerate(like.placements)]):  # tensor parallelism cuts first, then FSDP2
        if hasattr(placement, "dim"):  # else it is replicated
            length, n = tensor.shape[placement.dim], like.device_mesh.size(i)
            size = math.ceil(length / n)
            start = min(size * like.device_mesh.get_local_rank(i), length)
            tensor = tensor.narrow(placement.dim, start, min(size, length - start))
    return tensor


def local_shard(tensor: torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
    """Copies a whole tensor, or this process's slice of it, as a shard like `like`. Arguments: as for local_part."""
    part = local_part(tensor, like, name)
    if not hasattr(like, "placements") or tensor.shape != like.shape:
        return part.clone()
    from torch.distributed.tensor import DTensor

    part = part.to(like.device, copy=True, memory_format=torch.contiguous_format)
    return DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def local_rows(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns this process's rows of a whole tensor if `like` is sharded, else the tensor."""
    if not hasattr(like, "placements"):
        return tensor
    return tensor.chunk(mesh().n_sharing)[like.device_mesh.get_coordinate()[-1]].clone()


def as_shards(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> Sequence[torch.Tensor]:
    """Wraps local tensors, with equally many rows in each process, as DTensors if `like` is sharded."""
    if not hasattr(like, "placements"):
        return tensors
    from torch.distributed.tensor import DTensor

    return [DTensor.from_local(tensor, like.device_mesh, like.placements) for tensor in tensors]
