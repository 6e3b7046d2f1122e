"""Tensor and sequence parallelism: the processes of a group share every matrix and every sequence.

The first matrix of attention and of the MLP is cut by columns, attention's by heads; the second is cut by rows, so that
each process computes a part of every sum; the vocabulary is cut by token ids (Shoeybi et al. 2019). In between, each
process has its part of the sequence: a sublayer begins with an all-gather and ends with a reduce-scatter (Korthikanti
et al. 2022).

Every process of a group has the same batch. Dropout on parts of the sequence or on heads must differ between them.
"""

import logging
import math
from functools import partial

import torch

from model import GPT, IGNORE
from nanoladder.parallel.mesh import mesh
from operators import count_chunks, head_loss


def apply_tensor_parallel(model: GPT) -> None:
    """Cuts the model, or each of a pipeline's `parts`, in place. Does nothing unless several processes share it.

    Its matrices may be on the meta device. Of the other weights, the same in every process, each keeps its part.
    """
    if mesh().sizes.tensor == 1:
        return
    config = model.config
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it warns when FSDP's shards are gathered
    block_plan, end_plan = plans()
    for part in getattr(model, "parts", [model]):
        for block in part.blocks.children():
            for weight in block.attention.qkv.parameters():
                weight.data = by_process(weight.data)
            for sublayer in (block.attention, block.mlp):
                sublayer.register_forward_pre_hook(lambda _, inputs: as_autocast(*inputs))
            cut(block, block_plan)
        if config.position == "learned":
            part.position_embedding.register_forward_pre_hook(local_positions)
        cut(part, end_plan)
        # Tied again, because each was cut by itself; in a pipeline no stage has both
        if config.tie_embeddings and hasattr(part, "head") and hasattr(part.token_embedding, "weight"):
            part.head.weight = part.token_embedding.weight
        if hasattr(part, "head"):  # not on the first stages of a pipeline
            part.forward = partial(loss, part)


def place_gradients(module):
    """Makes autograd cut the gradients of a module's parameters as the parameters are cut."""
    for parameter in module.parameters():
        parameter.register_hook(partial(place_like, parameter.placements))


def place_like(placements, gradient):
    """A gradient, cut as its weight is: it may be a sum over parts of the sequence, or whole on every process."""
    return gradient.detach().redistribute(placements=placements)


def local_positions(_, inputs):
    """Positions (T / n,) of this process's part of the sequence, from its group's (T,)."""
    return inputs[0].chunk(mesh().sizes.tensor)[mesh().place.tensor]


def plans():
    """Plans for parallelize_module: of a block, and of the modules around the blocks."""
    from torch.distributed.tensor import Replicate, Shard  # imported here, as in shards.py: it takes a second
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    sequence, whole = Shard(1), Replicate()
    gathered = PrepareModuleInput(input_layouts=sequence, desired_input_layouts=whole)
    block = {
        "attention_norm": SequenceParallel(),
        "attention": gathered,
        "attention.qkv": ColwiseParallel(),
        "attention.proj": RowwiseParallel(output_layouts=sequence),
        "mlp_norm": SequenceParallel(),
        "mlp": gathered,
        "mlp.fc": ColwiseParallel(),
        "mlp.proj": RowwiseParallel(output_layouts=sequence),
    }
    ends = {
        "token_embedding": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "position_embedding": SequenceParallel(sequence_dim=0, use_local_output=True),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(),
    }
    return block, ends


def cut(module, plan):
    """Parallelizes the submodules of the plan; a pipeline's stage lacks some."""
    from torch.distributed.tensor.parallel import parallelize_module

    names = {name for name, child in module.named_modules() if list(child.parameters())}
    present = {name: style for name, style in plan.items() if name in names}
    parallelize_module(module, mesh().weights["tensor"], present, src_data_rank=None)  # all have the same weights


def as_autocast(x):
    """The input of a matrix product in autocast's dtype, before it is gathered: half the bytes."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def loss(part, tokens, targets):
    """GPT.forward over a cut vocabulary: each process has the logits of its own rows, a chunk of them at a time."""
    from torch.distributed.tensor import Partial, Replicate

    config, tensor = part.config, mesh().weights["tensor"]
    hidden = as_autocast(part.hidden(tokens)).redistribute(placements=[Replicate()])  # (B, T, C)
    # Each process computes its rows' part of the gradient, so that the backward is a reduce-scatter
    hidden = hidden.to_local(grad_placements=[Partial()]).flatten(0, 1)  # (BT, C)
    weight = part.head.weight
    first_row = tensor.get_local_rank() * math.ceil(len(weight) / tensor.size())
    rows, flat = weight.to_local(), targets.flatten()  # (V / processes, C), (BT,)
    n_chunks = max(1, count_chunks(config.loss_chunks, len(flat), *rows.shape))
    group = tensor.get_group().group_name
    return head_loss(hidden, rows, flat, config.vocab_size, n_chunks, IGNORE, first_row, group)


# -- the fused qkv: cut by heads, its rows have to be reordered, in weights and in the optimizer's state


def by_process(rows, back=False):
    """Reorders rows (3C, ...), which are q k v of all heads, to q k v of each process's heads; or back."""
    n = mesh().sizes.tensor
    shape = (n, 3, -1) if back else (3, n, -1)
    return rows.unflatten(0, shape).transpose(0, 1).flatten(0, 2)


def is_reordered(name, like):
    """True if the named weight, or a tensor of its optimizer state, is cut and has reordered rows."""
    return mesh().sizes.tensor > 1 and ".qkv." in name and hasattr(like, "placements")
