"""Sharding (FSDP2), and conversions between whole and sharded tensors."""

from functools import partial

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from nanoladder.errors import BadInput
from nanoladder.machine import choose_dtype, eight_bit_library
from nanoladder.parallel.group import rank
from nanoladder.parallel.mesh import mesh
from nanoladder.parallel.pipeline import TIED
from nanoladder.parallel.tensor import by_process, is_reordered


def fully_shard(model):
    """Shards the model in place (FSDP2, Zhao et al. 2023): each process keeps its shard of every tensor.

    FSDP gathers a block's weights before its forward and reduce-scatters its gradients after its backward. The root
    group stays gathered until the backward ends: the tied token embedding and head, the position embedding and the
    final norm. With shard_within, the shards of a node (or of so many processes) are replicated on the others. A single
    process has nothing to shard. Raises BadInput if the 8-bit optimizer cannot be sharded.
    """
    if mesh().averaging == 1:
        return
    from torch.distributed import fsdp  # imported here, as DTensor is below: it takes a second that other runs save

    config, device_type = model.config, mesh().device_type
    if config.optimizer == "adamw8bit":
        check_8_bits(model, torch.device(device_type))
    weights = mesh().weights
    where = weights["shard"] if mesh().n_sharing == mesh().averaging else weights["replicate", "shard"]
    dtype = choose_dtype(config.dtype, torch.device(device_type))
    # On a GPU, weights are gathered in autocast's dtype; on a CPU, LayerNorm does not support half-precision weights.
    half = dtype if device_type == "cuda" and dtype != torch.float32 else None
    policy = fsdp.MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # In a pipeline, a block's weights stay gathered for all micro-batches of a step
    reshard = config.shard == "full" and mesh().sizes.pipeline == 1
    for part in getattr(model, "parts", [model]):
        for block in part.blocks:
            fsdp.fully_shard(block, mesh=where, mp_policy=policy, reshard_after_forward=reshard)
        fsdp.fully_shard(part, mesh=where, reshard_after_forward=False)


def check_8_bits(model, device):
    """Raises BadInput if the state of 8-bit AdamW cannot be sharded."""
    n = mesh().n_sharing
    uneven = [f"{name} has {len(p)}" for name, p in model.named_parameters() if len(p) % n]
    shard = model.config.shard
    if uneven:
        raise BadInput(
            f"optimizer=adamw8bit with shard={shard} needs as many rows of a tensor in each of {n} processes, and "
            f"{uneven[0]}; expected --pad_vocab_to, --context_length and --n_embd to be multiples of {n}, or "
            "--shard=none"
        )
    if eight_bit_library(device) == "bitsandbytes":
        raise BadInput(f"optimizer=adamw8bit with shard={shard} needs torchao; install it, or use --shard=none")


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
