"""Sharding (FSDP2), and conversions between whole and sharded tensors."""

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from nanoladder.errors import BadInput
from nanoladder.machine import choose_dtype, eight_bit_library
from nanoladder.parallel.group import rank, world_size


def fully_shard(model, config, device):
    """Shards the model in place (FSDP2, Zhao et al. 2023): each process keeps its shard of every tensor.

    FSDP gathers a block's weights before its forward and reduce-scatters its gradients after its backward. The root
    group stays gathered until the backward ends: the tied token embedding and head, the position embedding and the
    final norm. Raises BadInput if the 8-bit optimizer cannot be sharded.
    """
    from torch.distributed import fsdp  # imported here, as DTensor is below: it takes a second that other runs save

    if config.optimizer == "adamw8bit":
        check_8_bits(model, config, device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (world_size(),))
    dtype = choose_dtype(config.dtype, device)
    # On a GPU, weights are gathered in autocast's dtype; on a CPU, LayerNorm does not support half-precision weights.
    half = dtype if device.type == "cuda" and dtype != torch.float32 else None
    policy = fsdp.MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.shard == "full")
    fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=False)


def check_8_bits(model, config, device):
    """Raises BadInput if the state of 8-bit AdamW cannot be sharded."""
    uneven = [f"{name} has {len(p)}" for name, p in model.named_parameters() if len(p) % world_size()]
    if uneven:
        raise BadInput(
            f"optimizer=adamw8bit with shard={config.shard} needs as many rows of a tensor in each of {world_size()} "
            f"processes, and {uneven[0]}; expected --pad_vocab_to, --context_length and --n_embd to be multiples of "
            f"{world_size()}, or --shard=none"
        )
    if eight_bit_library(device) == "bitsandbytes":
        raise BadInput(f"optimizer=adamw8bit with shard={config.shard} needs torchao; install it, or use --shard=none")


def full_tensor(tensor):
    """Returns the whole tensor, gathered if it is sharded. Collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gather_state(state):
    """Copies a state dict to rank 0's CPU, gathering sharded tensors; other ranks get None for tensors. Collective."""
    copies = {}  # {id: copy}, so that tied tensors are copied once

    def copy(tensor):
        if id(tensor) not in copies:
            whole = full_tensor(tensor.detach())  # only one whole tensor is on the device at a time
            copies[id(tensor)] = whole.to("cpu", copy=True) if rank() == 0 else None
        return copies[id(tensor)]

    return tree_map_only(torch.Tensor, copy, state)


def local_shard(tensor, like):
    """Shards a whole tensor as `like` if `like` is sharded and of the same shape; else returns the tensor."""
    if not hasattr(like, "placements") or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def local_rows(tensor, like):
    """Returns this process's rows of a whole tensor if `like` is sharded, else the tensor."""
    return tensor.chunk(world_size())[rank()].clone() if hasattr(like, "placements") else tensor


def as_shards(tensors, like):
    """Wraps local tensors, with equally many rows in each process, as DTensors if `like` is sharded."""
    if not hasattr(like, "placements"):
        return tensors
    from torch.distributed.tensor import DTensor

    return [DTensor.from_local(tensor, like.device_mesh, like.placements) for tensor in tensors]
