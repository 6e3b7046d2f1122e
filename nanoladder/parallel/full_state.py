"""Conversions between whole tensors and each process's parts.

A weight may be sharded, cut by tensor parallelism, and on only one pipeline stage. A checkpoint holds whole weights.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import utils

from nanoladder.parallel.division import Division, box_name, division_of, own_boxes
from nanoladder.parallel.group import gather_objects, rank, world_size
from nanoladder.parallel.mesh import local, mesh
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
    time is in memory. Collective, as is each iteration. shapes: {name: tensor without values}; divisions:
    {name: (its first stage, Division)}.
    """

    def __init__(self, parts: dict[str, torch.Tensor]) -> None:
        self.parts, self.shapes, self.divisions = parts, {}, {}
        facts = {name: (division_of(tensor, name), tensor.dtype) for name, tensor in parts.items()}
        for stage, received in enumerate(gather_stages(facts)):
            for name, (division, dtype) in received.items():
                self.shapes.setdefault(name, torch.empty(division.shape, dtype=dtype, device="meta"))
                self.divisions.setdefault(name, (stage, division))

    def __iter__(self):
        n = world_size() // mesh().sizes.pipeline  # processes of a stage
        for name, (stage, _) in sorted(self.divisions.items()):
            whole = self.gather(name) if stage == mesh().place.pipeline else None
            yield name, whole if stage == 0 else send_to_first(whole, stage * n, self.shapes[name])

    def gather(self, name: str) -> torch.Tensor | None:
        tensor = self.parts[name]
        whole = full_tensor(tensor.detach())
        whole = by_process(whole, back=True) if is_reordered(name, tensor) else whole
        return whole.to("cpu", copy=True) if not any(mesh().place[1:]) else None  # the first of its stage

    def own(self) -> dict[str, torch.Tensor]:
        """Returns the pieces that this process saves, {name with its slices: tensor}: of several equal ones, the first.

        Scalars are not among them.
        """
        (copy, shard), pieces = mesh().copy_and_shard, {}
        for name, (stage, division) in self.divisions.items():
            is_first = not shard or division.shard is not None, not mesh().place.tensor or division.tensor is not None
            if stage == mesh().place.pipeline and not copy and all(is_first) and division.shape:
                part = local(self.parts[name].detach())
                pieces |= {box_name(name, there): part[here] for here, there in own_boxes(division)}
        return pieces


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
    return functools.reduce(operator.or_, reversed(gather_stages(state)))  # the first stage's have precedence


def gather_stages(value: Any) -> list:
    """Lists the values of the stages of a pipeline, each the same in all processes of its stage. Collective."""
    if mesh().sizes.pipeline == 1:
        return [value]
    return gather_objects(value, mesh().weights["pipeline"].get_group())


def copy_part(whole: Any, target: torch.Tensor, name: str) -> None:
    """Copies this process's part of a whole tensor into the target's; zeros where the whole has fewer rows.

    whole: a tensor, or anything with a shape whose parts [slices] are tensors. target: a weight, or a shard like it.
    name: the weight's.
    """
    part = local(target)
    if whole.shape != target.shape:
        part.zero_()
    for here, there in own_boxes(division_of(target, name)):
        ends = [min(each.stop, length) for each, length in zip(there, whole.shape, strict=True)]
        if all(each.start < end for each, end in zip(there, ends, strict=True)):
            here = [slice(h.start, h.start + end - t.start) for h, t, end in zip(here, there, ends, strict=True)]
            part[tuple(here)] = whole[tuple(slice(t.start, end) for t, end in zip(there, ends, strict=True))]


def local_shard(whole: Any, like: torch.Tensor, name: str) -> torch.Tensor:
    """Copies a whole tensor, or of one in the shape of the weight `like` this process's part, as a shard like it.

    Arguments: as for copy_part.
    """
    if not hasattr(like, "placements") or whole.shape != like.shape:
        return whole[...].clone()
    from torch.distributed.tensor import DTensor

    part = torch.empty(local(like).shape, dtype=whole.dtype, device=like.device)
    shard = DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    copy_part(whole, shard, name)
    return shard


def local_rows(whole: Any, like: torch.Tensor) -> torch.Tensor:
    """Copies this process's rows of a whole tensor if `like` is sharded, else the tensor. whole: as for copy_part."""
    if not hasattr(like, "placements"):
        return whole[...].clone()
    ((_, (rows, *_)),) = own_boxes(Division(tuple(whole.shape), shard=0))
    return whole[rows].clone()


def as_shards(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> Sequence[torch.Tensor]:
    """Wraps local tensors, with equally many rows in each process, as DTensors if `like` is sharded."""
    if not hasattr(like, "placements"):
        return tensors
    from torch.distributed.tensor import DTensor

    return [DTensor.from_local(tensor, like.device_mesh, like.placements) for tensor in tensors]
