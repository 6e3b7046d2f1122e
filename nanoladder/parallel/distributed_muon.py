"""Work on whole matrices, each in one of the processes that hold its shards or a copy, in turn."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from nanoladder.parallel.mesh import mesh


def n_holders():
    """Number of processes that hold one copy of a stage's weights among them."""
    return mesh().n_sharing * mesh().sizes.tensor


def in_all_holders(n: int) -> int:
    """Number of matrices at once in all processes that hold a stage's weights, one copy or more, if each takes n."""
    return n * mesh().averaging * mesh().sizes.tensor


def map_matrices(
    function: Callable[[torch.Tensor], torch.Tensor], shards: Sequence[torch.Tensor], like: torch.Tensor, first: int = 0
) -> Sequence[torch.Tensor]:
    """Applies a function to whole matrices of one shape, each in one process. Returns this process's shards of them.

    function: maps (n, rows, columns) to the same shape. shards: this process's, local tensors that are sharded like the
    DTensor `like`, or whole matrices. first: number of matrices handled before these, so that owners take turns.
    Collective: of any number of matrices, each travels once to and once from its owner among the processes of a copy,
    in two all-to-alls, and once to every other copy, in an all-gather.
    """
    n = mesh().averaging // mesh().n_sharing  # copies
    if n == 1:
        return map_in_copy(function, shards, like, first)
    copies = mesh().weights["replicate"]
    skipped = (copies.get_local_rank() - first) % n
    own = shards[skipped::n]
    results = map_in_copy(function, own, like, (first + skipped) // n) if own else []
    padding = math.ceil(len(shards) / n) - len(own)  # 1 if other copies have one more
    sent = torch.stack([*results, *[torch.zeros_like(shards[0])] * padding])
    received = [torch.empty_like(sent) for _ in range(n)]
    dist.all_gather(received, sent, copies.get_group())
    return [received[(first + i) % n][i // n] for i in range(len(shards))]


def map_in_copy(function, shards, like, first):
    """Does the same among the processes that hold one copy of the weights."""
    n = n_holders()
    if n == 1:
        return function(torch.stack(shards)).unbind()
    group = mesh().holders.get_group()
    holders = [(first + i) % n for i in range(len(shards))]
    order = sorted(range(len(shards)), key=holders.__getitem__)  # of the matrices as they travel
    matrices = shards[0].new_empty(holders.count(group.rank()), *like.shape)
    sent_sizes = [holders.count(holder) * shards[0].numel() for holder in range(n)]
    received_sizes = [part.numel() for part in parts(matrices, like)]
    gathered = exchange([shards[i] for i in order], sent_sizes, received_sizes, group)
    for part, received in zip(parts(matrices, like), gathered.split(received_sizes), strict=True):
        part.copy_(received.view_as(part))
    results = function(matrices) if len(matrices) else matrices
    returned = exchange(parts(results, like), received_sizes, sent_sizes, group).view(len(shards), *shards[0].shape)
    place = dict(zip(order, returned, strict=True))
    return [place[i] for i in range(len(shards))]


def exchange(tensors, sent, received, group):
    """All-to-all of the tensors' numbers: sends sent[i] to process i, receives received[i] from it. Returns (n,)."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    result = flat.new_empty(sum(received))
    dist.all_to_all_single(result, flat, received, sent, group)
    return result


def parts(matrices, like):
    """Views of whole matrices (n, rows, columns): the shards of each process in turn, as a DTensor `like` them has."""
    return [part(matrices, like, *divmod(i, mesh().sizes.tensor)) for i in range(n_holders())]


def part(matrices, like, shard, tensor):
    place = {"shard": shard, "tensor": tensor}
    dimensions = zip(like.device_mesh.mesh_dim_names, like.device_mesh.shape, like.placements, strict=True)
    for name, n, placement in reversed(list(dimensions)):  # tensor parallelism cuts first
        if name in place and not placement.is_replicate():
            dim, size = placement.dim + 1, matrices.shape[placement.dim + 1]
            length = math.ceil(size / n)  # as torch.chunk; the last ones may be shorter, or empty
            start = min(place[name] * length, size)
            matrices = matrices.narrow(dim, start, min(length, size - start))
    return matrices
