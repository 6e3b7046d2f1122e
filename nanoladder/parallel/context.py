"""Context parallelism: the processes of a group share every sequence, and exchange activations around attention alone.

Each process has all weights and a part of every sequence; embeddings, norms, MLPs and the loss act on each token by
itself. Attention exchanges in one of two ways:

- heads, if they divide among the group (Jacobs et al. 2023): each process attends over whole sequences, with its
  share of the heads. Its tokens are contiguous.
- keys and values, else (Llama team 2024): each process gathers them for all tokens, and computes its own queries.
  Later queries attend to more keys, so its tokens are one piece from the front of the sequence and one from the back:
  every process has the same number of query-key pairs.
"""

from functools import partial

import torch
import torch.nn.functional as F

from model import GPT
from nanoladder.config import gathers_keys
from nanoladder.parallel.mesh import mesh
from nanoladder.private import all_gather_autograd, all_to_all_autograd


def positions(config):
    """Positions of a sequence that this process trains on: a tensor (T / n,), or None for all of them."""
    n, i = mesh().sizes.context, mesh().place.context
    if n == 1:
        return None
    everything = torch.arange(config.context_length)
    if not gathers_keys(config):
        return everything.chunk(n)[i]
    pieces = everything.chunk(2 * n)
    return torch.cat([pieces[i], pieces[-1 - i]])


def apply_context_parallel(model: GPT) -> None:
    """Makes attention exchange activations, in place. Does nothing unless several processes share a sequence."""
    if mesh().sizes.context == 1:
        return
    local, group = positions(model.config), mesh().context.get_group().group_name
    if gathers_keys(model.config):
        from torch.nn.attention.bias import causal_lower_right  # late: the compiler takes a second to load

        masks = [causal_lower_right(len(piece), int(piece[-1]) + 1) for piece in local.chunk(2)]  # (queries, keys)
        attend = partial(attend_to_gathered, group, masks)
    else:
        attend = partial(attend_by_heads, group)
    local = local.to(mesh().device_type)
    for part in getattr(model, "parts", [model]):  # of a pipeline
        if model.config.position == "learned":
            # Before the hook of tensor parallelism, which takes a part of these positions
            part.position_embedding.register_forward_pre_hook(lambda *_: (local,), prepend=True)
        if model.config.smear:
            part.previous.forward = partial(previous, part.previous.forward, group, model.config)
        for attention in (module for module in part.modules() if hasattr(module, "attend")):
            attention.attend = partial(attend, attention)
            if model.config.position == "rotary":
                rotary = attention.rotary
                rotary.cos, rotary.sin = rotary.cos[local], rotary.sin[local]
            if model.config.key_offset:
                attention.previous.forward = partial(previous, attention.previous.forward, group, model.config)


def attend_by_heads(group, attention, q, k, v):
    """The module's own attend over whole sequences, with a part of the heads: (B, nh, T / n, hs) -> the same."""
    q, k, v = exchange(torch.stack([q, k, v]), group, cut=2, joined=3)  # (B, nh / n, T, hs)
    return exchange(type(attention).attend(attention, q, k, v), group, cut=2, joined=1)


def previous(forward, group, config, x):
    """Previous's forward: each piece begins with the end of the one before, (B, ..., T / n, C) -> the same."""
    n_pieces = 2 if gathers_keys(config) else 1  # as in positions
    chunks, index = x.chunk(n_pieces, dim=-2), mesh().place.context
    ends = torch.cat([piece[..., -1:, :] for piece in chunks], dim=-2)
    ends = in_order(all_gather_autograd(ends, x.dim() - 2, group), n_pieces)  # (B, ..., pieces, C)
    begins = forward(ends).unbind(-2)
    pieces = zip(chunks, (begins[index], begins[-1 - index]), strict=False)
    return torch.cat([part for piece, begin in pieces for part in (begin.unsqueeze(-2), piece[..., :-1, :])], dim=-2)


def in_order(gathered, n_pieces):
    """Pieces of sequences (..., T, C), of every process in turn, in the order of the positions."""
    if n_pieces == 1:
        return gathered
    pieces = gathered.chunk(2 * mesh().sizes.context, dim=-2)  # front, back, front, ...
    return torch.cat([*pieces[::2], *pieces[::-2]], dim=-2)


def exchange(x, group, cut, joined):
    """Cuts dimension `cut` among the processes and joins dimension `joined` from them: an all-to-all."""
    x = x.unflatten(cut, (mesh().sizes.context, -1)).movedim(cut, 0)  # (n, ...)
    x = all_to_all_autograd(x.contiguous(), None, None, group)
    return x.movedim(0, joined).flatten(joined, joined + 1)


def attend_to_gathered(group, masks, attention, q, k, v):
    """Causal attention of the queries of this process to all keys: (B, nh, T / n, hs) -> the same."""
    k, v = in_order(all_gather_autograd(torch.stack([k, v]), 3, group), 2)  # (B, nh, T, hs)
    dropout = attention.config.dropout if attention.training else 0.0
    y = []
    for queries, mask in zip(q.chunk(2, dim=2), masks, strict=True):
        queries, end = queries.contiguous(), mask.seq_len_kv  # a view would keep the projection's k and v alive
        y.append(F.scaled_dot_product_attention(queries, k[:, :, :end], v[:, :, :end], mask, dropout))
    return torch.cat(y, dim=2)
