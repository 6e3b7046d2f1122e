"""The least time of a training step, with every operation at the limit of the device (roofline, Williams et al. 2009).

An operation takes the longest of three times: its floating-point operations at the rate of their dtype, its bytes at
the memory's rate, and its launch. trace.py counts a step's operations with count(). Fused, a run of operations that are
elementwise or reductions is one kernel: it reads each of its inputs once and writes only what is used after it. Data,
Python, and messages between processes take no time here.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from operators import count_scores

# -- Counting


def block_flops(q):
    """Floating-point operations of one product of queries and keys (B, nh, T, hs): of the blocks that are computed."""
    B, nh, T, hs = q.shape
    return 2 * B * nh * count_scores(T, q.dtype) * hs


aten = torch.ops.aten
FORMULAS = flop_registry | {  # {operator: FLOP of a call}
    aten.matmul: lambda a, _, out_val: 2 * out_val.numel() * a.shape[-1],
    aten.addmm_: flop_registry[aten.addmm],
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
    torch.ops.nanoladder.attend: lambda q, *_, **__: 2 * block_flops(q),
    torch.ops.nanoladder.attend_backward: lambda dy, *_, **__: 4 * block_flops(dy),
}
EMPTY = ("empty", "new_empty", "resize_")  # allocate, and move nothing
FILLS = ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "scalar_tensor", "arange")  # read shapes at most
OVERWRITES = ("copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_")  # do not read what they write
COPIES = (*FILLS, *OVERWRITES, "clone", "_to_copy", "to", "cat", "stack", "embedding", "gather", "triu")  # no FLOP
ALONE = ("embedding_dense_backward", "scatter_add_", "index_add_", "_fused")  # never part of a chain
PICKED = {"embedding": "weight", "gather": "self"}  # {operator: argument of which only the result's size is read}
UNREAD = {"nll_loss_forward": "self", "nll_loss_backward": "self", "scatter_add_": "self"}  # next to nothing is read


class Operation(NamedTuple):
    """A kernel: its FLOP, and {(number of a storage, offset in it): bytes} that it reads and that it writes.

    dtype: of a matrix product's inputs; "" for all that runs on vector units. chains: elementwise or a reduction, so
    that it can be fused with its neighbors. whole: reduces all of a tensor to one number, for which others wait.
    repeated: in the forward or backward of a micro-batch, not in the update.
    """

    name: str
    dtype: str
    flops: float
    reads: dict
    writes: dict
    launches: int = 1
    chains: bool = False
    whole: bool = False
    repeated: bool = True

    @property
    def bytes(self):
        return sum(self.reads.values()) + sum(self.writes.values())


class Work(NamedTuple):
    """The operations of a step, in order. first: the number of its first new storage; kept: those alive at its end."""

    operations: tuple
    first: int = 0
    kept: frozenset = frozenset()


def count(operator, args, kwargs, result, number, on_cuda, repeated, opaque):
    """The Operation of an operator's call; None if it moves no data, like a view.

    number: maps a storage to its number. repeated: as in Operation. opaque: True inside an operator that is opaque to a
    compiler.
    """
    if not isinstance(operator, OpOverload):
        return None
    name, arguments = operator.overloadpacket.__name__, operator._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    given = [(argument, tensor) for argument in arguments for tensor in tensors_in(named.get(argument.name))]
    known = {number(tensor.untyped_storage()) for _, tensor in given}
    made = [tensor for tensor in tensors_in(result) if number(tensor.untyped_storage()) not in known]
    changed = [tensor for argument, tensor in given if is_changed(name, argument)]
    if name.startswith(EMPTY) or not made + changed:
        return None
    n_made, reads, tensors = sum(map(extent, made)), {}, made + [tensor for _, tensor in given]
    for argument, tensor in given:
        overwritten = argument.is_out or (name in OVERWRITES and argument.name == "self")
        if not overwritten and not name.startswith(FILLS) and UNREAD.get(name) != argument.name:
            size = extent(tensor)
            reads[place(tensor, number)] = min(size, n_made) if PICKED.get(name) == argument.name else size
    written = [] if UNREAD.get(name) == arguments[0].name else made + changed
    dtype, flops = arithmetic(operator, args, kwargs, result, named, tensors)
    return Operation(
        name,
        dtype,
        flops,
        reads,
        writes={place(tensor, number): extent(tensor) for tensor in written},
        launches=len(args[0]) if name.startswith("_foreach_") and not on_cuda else 1,
        chains=not (dtype or opaque or name.startswith(ALONE)) and operator.namespace == "aten",
        whole=bool(made) and all(t.numel() == 1 for t in made) and any(t.numel() > 1 for _, t in given),
        repeated=repeated,
    )


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def extent(tensor):
    """Bytes of a tensor's numbers, each counted once: an expanded dimension repeats them."""
    return tensor.itemsize * math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)


def place(tensor, number):
    return number(tensor.untyped_storage()), tensor.storage_offset()


def is_changed(name, argument):
    """True for an argument that an operator writes to. AdamW's kernel may unscale gradients, but there is no scale."""
    changed = argument.alias_info is not None and argument.alias_info.is_write
    return changed and not (name == "_fused_adamw_" and argument.name == "grads")


def arithmetic(operator, args, kwargs, result, named, tensors):
    """(dtype, FLOP) of a call: of products of matrices by PyTorch's formulas; else one for each number, with dtype "".

    A causal attention kernel skips the masked half. Its exponentials do not count.
    """
    packet = operator.overloadpacket
    if packet not in FORMULAS:
        flops = 0 if packet.__name__.startswith(COPIES) else max(tensor.numel() for tensor in tensors)
        return "", flops
    flops = FORMULAS[packet](*args, **kwargs, out_val=result)
    if named.get("is_causal"):
        n_queries, n_keys = named["query"].shape[-2], named["key"].shape[-2]
        flops *= 1 - (n_queries - 1) / (2 * n_keys)
    factor = min(tensors_in(args)[:3], key=lambda tensor: tensor.itemsize)  # a sum that is added to may be in float32
    return str(factor.dtype).removeprefix("torch."), flops


def fuse(work, update=True):
    """The Work with each run of chaining operations in one kernel; those of the update too, unless told otherwise.

    A run ends before an operation that does not chain, and after one that reduces a whole tensor to a number.
    """
    last_read = {key[0]: at for at, operation in enumerate(work.operations) for key in operation.reads}

    def chains(operation):
        return operation.chains and (operation.repeated or update)

    runs, fused = [work.operations[:1]], []
    for before, operation in itertools.pairwise(work.operations):
        if chains(before) and chains(operation) and not before.whole and before.repeated == operation.repeated:
            runs[-1] += (operation,)
        else:
            runs.append((operation,))
    for run, end in zip(runs, itertools.accumulate(map(len, runs)), strict=True):
        if chains(run[0]):
            kernel = chain(run)
            used = [key for key in kernel.writes if key[0] in work.kept or last_read.get(key[0], 0) >= end]
            run = [kernel._replace(writes={key: kernel.writes[key] for key in used})]
        fused += run
    return work._replace(operations=tuple(fused))


def chain(run):
    """One kernel of a run of operations, which writes all that they write."""
    reads, writes, made = {}, {}, set()  # made: numbers of the storages written
    for operation in run:
        for key, size in operation.reads.items():
            if key[0] not in made:
                reads[key] = max(size, reads.get(key, 0))
        writes |= operation.writes
        made |= {storage for storage, _ in operation.writes}
    name = run[0].name if len(run) == 1 else f"{len(run)} fused"
    flops = sum(operation.flops for operation in run)
    return run[0]._replace(name=name, flops=flops, reads=reads, writes=writes, launches=1, whole=False)


# -- Times

NEW_PAGES = 2**25  # bytes: a tensor this large gets new pages from the system (mallopt(3)), unless freed ones are kept


class Time(NamedTuple):
    """Least seconds of a step, {bound: seconds}."""

    bounds: dict

    @property
    def seconds(self):
        return sum(self.bounds.values())


def least_time(work, device, passes: float = 1, tf32=False, keeps_memory=True):
    """Returns the Time of a Work. passes: number of times that a micro-batch's operations run.

    keeps_memory: tensors of NEW_PAGES bytes or more get no new pages.
    """
    total, seen = {}, set()
    for operation in work.operations:
        made = {key: size for key, size in operation.writes.items() if key[0] >= work.first and key[0] not in seen}
        seen |= {key[0] for key in operation.writes}
        new_bytes = 0 if keeps_memory else sum(size for size in made.values() if size >= NEW_PAGES)
        times = seconds(operation, device, tf32, new_bytes)
        bound = max(times, key=lambda bound: times[bound])
        total[bound] = total.get(bound, 0.0) + times[bound] * (passes if operation.repeated else 1)
    return Time(total)


def seconds(operation, device, tf32=False, new_bytes=0):
    """The least seconds of an operation by each of compute, memory and launches; the longest of them counts."""
    rate = device.rate(operation.dtype or "float32", tf32 and bool(operation.dtype))
    moved = [size for part in (operation.reads, operation.writes) for size in part.values()]
    return {
        "compute": operation.flops / rate,
        "memory": sum(size / device.bandwidth(size) for size in moved) + new_bytes / device.new_bytes_per_s,
        "launches": operation.launches * device.launch_seconds,
    }
