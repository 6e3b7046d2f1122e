"""Counts the messages that processes exchange in a step."""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


def kind_of(operator):
    """The kind of message of a c10d operator, which DDP, FSDP2 and pipelines call, or of a functional one of DTensor.

    None for any other. An operator's name is its kind's with other underscores, and more words.
    """
    if operator.namespace in ("c10d", "_c10d_functional"):
        name = operator._schema.name.replace("_", "")
        return next((kind for kind in KINDS if kind.replace("_", "") in name), None)
    return None


class Counter(TorchDispatchMode):
    """Counts this process's collectives and sends, {kind: [calls, bytes]}, in eager code (sent).

    Bytes count the larger of a call's input and output: an all_gather's output, a reduce_scatter's input. A
    ring sends (n-1)/n of them, an all_reduce twice that. Groups of one process send nothing and are left out.
    """

    def __init__(self):
        super().__init__()
        self.sent = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors' operators come by themselves
        result = operator(*args, **(kwargs or {}))
        kind = kind_of(operator)
        if kind and group_size(args) > 1:
            self.sent[kind][0] += 1
            self.sent[kind][1] += max(n_bytes(part) for part in (*args, result))
        return result


def n_bytes(part):
    """Bytes of a tensor, or of all those in a list."""
    return sum(leaf.nbytes for leaf in tree_leaves(part) if torch.is_tensor(leaf))


def group_size(args):
    """Number of processes of the group among a collective's arguments: an object, or its name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            return dist.ProcessGroup.unbox(arg).size()
        if isinstance(arg, dist.ProcessGroup):
            return arg.size()
    return dist.distributed_c10d._resolve_process_group(args[-1]).size()
