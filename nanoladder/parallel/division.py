"""Division of whole tensors among processes, a function of the mesh alone: any process knows what any other holds.

Tensor parallelism cuts a tensor first, then the shards do, as torch.chunk does: the last parts may be short or empty.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from nanoladder.parallel.mesh import mesh
from nanoladder.parallel.tensor import is_reordered


class Sizes(NamedTuple):
    """Numbers of processes that hold one copy of a model among them: stages × shards × parts of every matrix."""

    pipeline: int
    shard: int
    tensor: int


class Division(NamedTuple):
    """A whole tensor's shape, and the dimensions along which shards and tensor parallelism cut it (None: not cut).

    fused: if its rows are q, k and v of all heads, and each process of a tensor group has those of its heads.
    """

    shape: tuple[int, ...]
    shard: int | None = None
    tensor: int | None = None
    fused: bool = False

    def ranges(self, sizes: Sizes, shard: int, tensor: int) -> list[list[range]]:
        """Lists, for each dimension, the indices that one process holds, in the order in which it holds them."""
        held = [[range(length)] for length in self.shape]
        if self.tensor is not None:
            pieces = [chunk(held[self.tensor], third, 3) for third in range(3)] if self.fused else [held[self.tensor]]
            held[self.tensor] = [part for piece in pieces for part in chunk(piece, tensor, sizes.tensor)]
        if self.shard is not None:
            held[self.shard] = chunk(held[self.shard], shard, sizes.shard)
        return held


def chunk(ranges, index, n):
    """Returns the index-th of n equally long parts of a list of ranges, without empty ones."""
    size = math.ceil(sum(map(len, ranges)) / n)
    begin, end, parts = size * index, size * (index + 1), []
    for each in ranges:
        parts.append(each[max(begin, 0) : max(end, 0)])
        begin, end = begin - len(each), end - len(each)
    return [part for part in parts if part]


Slices = tuple[slice, ...]


def boxes(ranges: list[list[range]]) -> Iterator[tuple[Slices, Slices]]:
    """Yields (slices of a process's part, slices of the whole tensor) for each contiguous piece of the part."""
    pairs = []
    for each in ranges:
        ends = [*itertools.accumulate(map(len, each), initial=0)]
        here = [slice(*pair) for pair in itertools.pairwise(ends)]
        pairs.append([*zip(here, [slice(one.start, one.stop) for one in each], strict=True)])
    for pieces in itertools.product(*pairs):
        yield tuple(here for here, _ in pieces), tuple(there for _, there in pieces)


def box_name(name: str, there: Slices) -> str:
    """Names a piece of a whole tensor: head.weight[0:64,0:32]."""
    return f"{name}[{','.join(f'{each.start}:{each.stop}' for each in there)}]"


def sizes() -> Sizes:
    """The Sizes of this run's mesh."""
    return Sizes(mesh().sizes.pipeline, mesh().n_sharing, mesh().sizes.tensor)


def division_of(tensor: torch.Tensor, name: str) -> Division:
    """Returns the Division of a weight or a tensor of its state. name: the weight's, or one that contains it."""
    cut = {}
    if hasattr(tensor, "placements"):
        axes = zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True)  # pyright: ignore
        cut = {axis: placement.dim for axis, placement in axes if hasattr(placement, "dim")}
    return Division(tuple(tensor.shape), cut.get("shard"), cut.get("tensor"), is_reordered(name, tensor))


def own_boxes(division: Division) -> Iterator[tuple[Slices, Slices]]:
    """Yields boxes() of this process's part."""
    return boxes(division.ranges(sizes(), mesh().copy_and_shard[1], mesh().place.tensor))
