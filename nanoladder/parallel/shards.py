"""Sharding (FSDP2)."""

import torch

from model import GPT
from nanoladder.machine import choose_dtype
from nanoladder.parallel.checks import check_8_bits
from nanoladder.parallel.mesh import mesh


def fully_shard(model: GPT) -> None:
    """Shards the model in place (FSDP2, Zhao et al. 2023): each process keeps its shard of every tensor.

    FSDP gathers a block's weights before its forward and reduce-scatters its gradients after its backward. The root
    group stays gathered until the backward ends: the tied token embedding and head, the position embedding and the
    final norm; in float32, because the residual stream begins with the embeddings. With shard=hybrid, each node has a
    whole copy. A single process has nothing to shard. Raises BadInput if the 8-bit optimizer cannot be sharded.
    """
    if mesh().averaging == 1:
        return
    from torch.distributed import fsdp  # imported here, as DTensor is below: it takes a second that other runs save

    device_type, weights = mesh().device_type, mesh().weights
    if model.config.optimizer == "adamw8bit":
        check_8_bits(model)
    where = weights["shard"] if mesh().n_sharing == mesh().averaging else weights["replicate", "shard"]
    dtype = choose_dtype(model.config.dtype, torch.device(device_type))
    # On a GPU, weights are gathered in autocast's dtype; on a CPU, LayerNorm does not support half-precision weights.
    half = dtype if device_type == "cuda" and dtype != torch.float32 else None
    policy = fsdp.MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    reshard = model.config.shard != "optimizer"
    if mesh().sizes.pipeline > 1:
        reshard = False  # a block's weights stay gathered for all micro-batches of a step
    for part in getattr(model, "parts", [model]):
        for block in part.blocks:
            fsdp.fully_shard(block, mesh=where, mp_policy=policy, reshard_after_forward=reshard)
        fsdp.fully_shard(part, mesh=where, reshard_after_forward=False)
        part.register_forward_hook(free_unless_training)


def free_unless_training(part, *_):
    """Frees gathered weights after a forward without gradients.

    They would wait for a backward, and the next step would use them, though other weights may be swapped in by then.
    """
    if not torch.is_grad_enabled():
        for module in (part, *part.blocks.children()):
            module.reshard()
