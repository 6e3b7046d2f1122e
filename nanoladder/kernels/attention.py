"""Causal attention for CPUs, in blocks of queries: each is multiplied only by the keys that its mask does not hide.

The products are PyTorch's, at the full rate of a CPU; its fused kernel reaches a sixth of that in bfloat16. They take a
few heads at a time, whose scores stay in the cache. The blocks' probabilities are kept for the backward, in little more
than half the memory of the (T, T) matrix.

To torch.compile forward and backward are opaque operators: in its graph the loops would be unrolled.
"""

import math

import torch

CACHE = 2**21  # bytes of scores that are worked on at a time, about the second-level caches of two cores
SIZE, MOST = 128, 8  # queries in a block, at least; blocks of a sequence, at most


def uses_blocks(attention, device_type, dtype, dropout):
    """True for attention="blocks", and for "auto" without dropout, in bfloat16 on a CPU.

    In float32 SDPA takes less time, except for about 500 to 2000 tokens.
    """
    suits = device_type == "cpu" and dtype == torch.bfloat16 and dropout == 0
    return attention == "blocks" or (attention == "auto" and suits)


def attend_in_blocks(q, k, v):
    """Causal attention, without dropout, of queries, keys and values (B, nh, T, hs) of one dtype -> the same shape."""
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return operator(q, k, v, needs_grad)[0]


def blocks(T):
    """[(start, end)] of the blocks of T queries. The keys of a block are those before its end."""
    size = max(SIZE, math.ceil(T / MOST))
    return [(start, min(start + size, T)) for start in range(0, T, size)]


def count_scores(T):
    """Number of scores of all blocks of a head."""
    return sum((end - start) * end for start, end in blocks(T))


def product_flops(shape):
    """Floating-point operations of one product, of queries and keys (B, nh, T, hs): of the blocks that are computed."""
    B, nh, T, hs = shape
    return 2 * B * nh * count_scores(T) * hs


def heads_at_a_time(q):
    """Yields the indices (sequences, heads) of parts of q (B, nh, T, hs), each of as many heads as CACHE holds."""
    B, nh, T, _ = q.shape
    n = max(1, CACHE // (q.itemsize * T * min(T, max(SIZE, math.ceil(T / MOST)))))
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
    return empty_like(q), q.new_empty(B * nh * count_scores(T) if needs_grad else 0)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, needs_grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator. Returns the output and, one after the other, the blocks' probabilities; none if not needs_grad."""
    y, kept = empty_results(q, k, v, needs_grad)
    scale, at = 1 / math.sqrt(q.shape[-1]), 0
    size = blocks(q.shape[2])[0][1]
    future = torch.ones(size, size, dtype=torch.bool).triu_(1)
    for part in heads_at_a_time(q):
        q_, k_, v_ = by_head(q[part] * scale), by_head(k[part]), by_head(v[part])  # (n, T, hs)
        y_ = torch.empty_like(q_)
        for start, end in blocks(q.shape[2]):
            scores = torch.bmm(q_[:, start:end], k_[:, :end].mT)  # (n, size, end)
            scores[:, :, start:].masked_fill_(future[: end - start, : end - start], -math.inf)
            weights = kept[at : at + scores.numel()].view_as(scores) if needs_grad else scores
            torch.softmax(scores, -1, out=weights)
            torch.bmm(weights, v_[:, :end], out=y_[:, start:end])
            at += scores.numel()
        y[part] = y_.view_as(y[part])
    return y, kept


def backward(
    dy: torch.Tensor, y: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v. kept: the probabilities, from the forward."""
    dq, dk, dv = (empty_like(q) for _ in range(3))
    scale, at = 1 / math.sqrt(q.shape[-1]), 0
    for part in heads_at_a_time(q):
        q_, k_, v_, dy_, y_ = (by_head(tensor[part]) for tensor in (q, k, v, dy, y))  # (n, T, hs)
        delta = (dy_ * y_).sum(-1, keepdim=True)  # (n, T, 1), Σ over the keys of weight times its gradient
        dq_, dk_, dv_ = torch.empty_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
        for start, end in blocks(q.shape[2]):
            d_scores = torch.bmm(dy_[:, start:end], v_[:, :end].mT)  # (n, size, end), of the weights so far
            weights = kept[at : at + d_scores.numel()].view_as(d_scores)
            d_scores.sub_(delta[:, start:end]).mul_(weights)
            torch.bmm(d_scores, k_[:, :end], out=dq_[:, start:end])
            dk_[:, :end].baddbmm_(d_scores.mT, q_[:, start:end])
            dv_[:, :end].baddbmm_(weights.mT, dy_[:, start:end])
            at += d_scores.numel()
        torch.mul(dq_.view_as(dq[part]), scale, out=dq[part])
        torch.mul(dk_.view_as(dk[part]), scale, out=dk[part])
        dv[part] = dv_.view_as(dv[part])
    return dq, dk, dv


def keep(ctx, inputs, output):
    q, k, v, _ = inputs
    y, kept = output
    ctx.save_for_backward(y, q, k, v, kept)
    ctx.set_materialize_grads(False)  # the weights' gradient would be zeros, as large as they are


def differentiate(ctx, dy, _):
    if dy is None:  # nothing depends on the output
        return None, None, None, None
    return *backward_operator(dy, *ctx.saved_tensors), None


operator = torch.library.custom_op("nanoladder::attend", forward, mutates_args=())
operator.register_fake(empty_results)
operator.register_autograd(differentiate, setup_context=keep)
backward_operator = torch.library.custom_op("nanoladder::attend_backward", backward, mutates_args=())
backward_operator.register_fake(lambda dy, y, q, k, v, kept: tuple(empty_like(q) for _ in range(3)))
