"""Causal attention for CPUs, in blocks of queries: each is multiplied only by the keys that its mask does not hide.

The products are PyTorch's and run at the CPU's full rate; PyTorch's fused kernel reaches a sixth of it in bfloat16 and
half in float32. They process a few heads at a time, whose scores stay in the cache, and write to contiguous memory, as
MKL requires for many matrices in one call. The blocks' probabilities are kept for the backward, in little more than
half the memory of the (T, T) matrix.

To torch.compile, forward and backward are opaque operators: in its graph, the loops would be unrolled.
"""

import math
from collections.abc import Iterator

import torch

from operators.private import softmax_backward
from operators.register import register

CACHE = 2**21  # bytes of scores that are worked on at a time, about the second-level caches of two cores
SIZE, MOST = 256, 8  # minimum bytes of one key's scores in a block; maximum blocks in a sequence


def uses_blocks(attention: str, dropout: float, context_length: int, device: torch.device, dtype: torch.dtype) -> bool:
    """True for attention="blocks", and for "auto" if blocks take less time than SDPA: on a CPU, without dropout, in
    bfloat16, or in float32 with a context of 256 to 1024 tokens.
    """
    if attention != "auto" or device.type != "cpu" or dropout > 0:
        return attention == "blocks"
    return dtype == torch.bfloat16 or (dtype == torch.float32 and 256 <= context_length <= 1024)


def attend_in_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention, without dropout, of queries, keys and values (B, nh, T, hs) of one dtype -> the same shape."""
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return operator(q, k, v, needs_grad)[0]


def block_size(T, dtype):
    """Number of queries in a block: at least 128 in bfloat16, 64 in float32."""
    return max(SIZE // dtype.itemsize, math.ceil(T / MOST))


def blocks(T, dtype):
    """[(start, end)] of the blocks of T queries. The keys of a block are those before its end."""
    size = block_size(T, dtype)
    return [(start, min(start + size, T)) for start in range(0, T, size)]


def count_scores(T: int, dtype: torch.dtype) -> int:
    """Total number of scores in all blocks of a head."""
    return sum((end - start) * end for start, end in blocks(T, dtype))


def heads_at_a_time(q: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yields the indices (sequences, heads) of parts of q (B, nh, T, hs), each of as many heads as CACHE holds."""
    B, nh, T, _ = q.shape
    n = max(1, CACHE // (q.itemsize * T * min(T, block_size(T, q.dtype))))
    n_sequences, n_heads = max(1, n // nh), min(n, nh)
    for first in range(0, B, n_sequences):
        for head in range(0, nh, n_heads):
            yield slice(first, first + n_sequences), slice(head, head + n_heads)


def by_head(tensor):
    """(b, n, T, hs) -> (b · n, T, hs), contiguous."""
    return tensor.flatten(0, 1).contiguous()


def empty_like(q):
    """An empty (B, nh, T, hs) in the memory of a (B, T, nh, hs), as the model reads it."""
    B, nh, T, hs = q.shape
    return q.new_empty(B, T, nh, hs).transpose(1, 2)


def empty_results(q, k, v, needs_grad):
    B, nh, T, _ = q.shape
    return empty_like(q), q.new_empty(B * nh * count_scores(T, q.dtype) if needs_grad else 0)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, needs_grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator. Returns the output and the blocks' concatenated probabilities, empty if not needs_grad."""
    y, kept = empty_results(q, k, v, needs_grad)
    scale, at, size = 1 / math.sqrt(q.shape[-1]), 0, block_size(q.shape[2], q.dtype)
    future = torch.ones(size, size, dtype=torch.bool).triu_(1)
    for part in heads_at_a_time(q):
        q_, k_, v_ = by_head(q[part] * scale), by_head(k[part]), by_head(v[part])  # (n, T, hs)
        for start, end in blocks(q.shape[2], q.dtype):
            scores = torch.bmm(q_[:, start:end], k_[:, :end].mT)  # (n, size, end)
            scores[:, :, start:].masked_fill_(future[: end - start, : end - start], -math.inf)
            weights = kept[at : at + scores.numel()].view_as(scores) if needs_grad else scores
            torch.softmax(scores, -1, out=weights)
            y_ = y[part][:, :, start:end]
            y_.copy_(torch.bmm(weights, v_[:, :end]).view_as(y_))
            at += scores.numel()
    return y, kept


def backward(
    dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v. kept: the probabilities, from the forward."""
    dq, dk, dv = (empty_like(q) for _ in range(3))
    scale, at = 1 / math.sqrt(q.shape[-1]), 0
    for part in heads_at_a_time(q):
        q_, k_, v_, dy_ = (by_head(tensor[part]) for tensor in (q, k, v, dy))  # (n, T, hs)
        dk_, dv_ = torch.zeros_like(k_), torch.zeros_like(v_)
        for start, end in blocks(q.shape[2], q.dtype):
            d_scores = torch.bmm(dy_[:, start:end], v_[:, :end].mT)  # (n, size, end), of the weights so far
            weights = kept[at : at + d_scores.numel()].view_as(d_scores)
            softmax_backward(d_scores, weights, -1, d_scores.dtype, grad_input=d_scores)
            dq_ = dq[part][:, :, start:end]
            torch.mul(torch.bmm(d_scores, k_[:, :end]).view_as(dq_), scale, out=dq_)
            dk_[:, :end] += torch.bmm(d_scores.mT, q_[:, start:end])
            dv_[:, :end] += torch.bmm(weights.mT, dy_[:, start:end])
            at += d_scores.numel()
        torch.mul(dk_.view_as(dk[part]), scale, out=dk[part])
        dv[part] = dv_.view_as(dv[part])
    return dq, dk, dv


def empty_gradients(dy, q, k, v, kept):
    return tuple(empty_like(q) for _ in range(3))


def keep(ctx, inputs, output):
    q, k, v, _ = inputs
    ctx.save_for_backward(q, k, v, output[1])
    ctx.set_materialize_grads(False)  # the probabilities' gradient would be zeros of the same size


def differentiate(ctx, dy, _):
    if dy is None:  # nothing depends on the output
        return None, None, None, None
    return *backward_operator(dy, *ctx.saved_tensors), None


operator = register("nanoladder::attend", forward, empty_results, differentiate, keep)
backward_operator = register("nanoladder::attend_backward", backward, empty_gradients)
