"""Causal attention for CPUs, in blocks of queries: each is multiplied only by the keys that its mask does not hide.

The products are PyTorch's, at the rate of a CPU's matrix products. A few heads at a time, so that their scores stay in
the cache. The probabilities of the blocks are kept for the backward: half the memory of the whole (T, T) matrix.

To torch.compile this is one opaque operator, so that the order of the loops stays.
"""

import math

import torch

CACHE = 2**20  # bytes of scores that are worked on at a time: a core's second-level cache
SIZE, MOST = 128, 8  # queries in a block, at least; blocks, at most


def attend_in_blocks(q, k, v):
    """Causal attention (B, nh, T, hs) of queries, keys and values of that shape, of one dtype, without dropout."""
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return forward(q, k, v, needs_grad)[0]


def uses_blocks(attention, device, dropout):
    """True for attention="blocks", and for "auto" on a CPU without dropout, where blocks take less time than SDPA."""
    return attention == "blocks" or (attention == "auto" and device.type == "cpu" and dropout == 0)


def blocks(T):
    """[(first, end)] of the blocks of T queries; a block's keys are those before its end."""
    size = max(SIZE, math.ceil(T / MOST))
    return [(start, min(start + size, T)) for start in range(0, T, size)]


def some_heads(T, n_heads, itemsize):
    """Slices of the heads of all sequences; a block's scores of as many fit the cache."""
    size = max(end - start for start, end in blocks(T))
    step = max(1, CACHE // (size * T * itemsize))
    return [slice(start, min(start + step, n_heads)) for start in range(0, n_heads, step)]


def by_head(tensor):
    """(B, nh, T, hs) -> (B · nh, T, hs), contiguous."""
    return tensor.flatten(0, 1).contiguous()


def like_output(q):
    """An empty (B, nh, T, hs) whose memory is (B, T, nh, hs), which the model's next layer reads."""
    return torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


@torch.library.custom_op("nanoladder::attend", mutates_args=())
def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, needs_grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator. Returns the output and the probabilities of all blocks, empty if not needs_grad."""
    y, (B, nh, T, _) = like_output(q), q.shape
    scale, q, k, v = 1 / math.sqrt(q.shape[-1]), by_head(q), by_head(k), by_head(v)
    out = torch.empty_like(q)
    kept = q.new_empty(B * nh * sum((end - start) * end for start, end in blocks(T)) if needs_grad else 0)
    at = 0
    for some in some_heads(T, B * nh, q.itemsize):
        for start, end in blocks(T):
            scores = torch.bmm(q[some, start:end] * scale, k[some, :end].mT)  # (n, size, end)
            hidden = torch.ones(end - start, end - start, dtype=torch.bool).triu_(1)
            scores[:, :, start:].masked_fill_(hidden, -math.inf)
            probabilities = kept[at : at + scores.numel()].view_as(scores) if needs_grad else scores
            torch.softmax(scores, -1, out=probabilities)
            at += scores.numel()
            torch.bmm(probabilities, v[some, :end], out=out[some, start:end])
    y.copy_(out.view_as(y))
    return y, kept


@forward.register_fake
def _(q, k, v, needs_grad):
    B, nh, T, _ = q.shape
    return like_output(q), q.new_empty(B * nh * sum((end - start) * end for start, end in blocks(T)) * needs_grad)


@torch.library.custom_op("nanoladder::attend_backward", mutates_args=())
def backward(
    dy: torch.Tensor, y: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    gradients, (B, nh, T, _) = [like_output(q) for _ in range(3)], q.shape
    scale, q, k, v, dy_ = 1 / math.sqrt(q.shape[-1]), by_head(q), by_head(k), by_head(v), by_head(dy)
    delta = by_head((dy * y).sum(-1, keepdim=True))  # (B · nh, T, 1)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    at = 0
    for some in some_heads(T, B * nh, q.itemsize):
        for start, end in blocks(T):
            d_scores = torch.bmm(dy_[some, start:end], v[some, :end].mT)
            probabilities = kept[at : at + d_scores.numel()].view_as(d_scores)
            at += d_scores.numel()
            d_scores.sub_(delta[some, start:end]).mul_(probabilities)
            torch.bmm(d_scores, k[some, :end], out=dq[some, start:end])
            dv[some, :end].baddbmm_(probabilities.mT, dy_[some, start:end])
            dk[some, :end].baddbmm_(d_scores.mT, q[some, start:end])
    for gradient, d, factor in zip(gradients, (dq, dk, dv), (scale, scale, 1.0), strict=True):
        torch.mul(d.view_as(gradient), factor, out=gradient)
    return tuple(gradients)


@backward.register_fake
def _(dy, y, q, k, v, kept):
    return like_output(q), like_output(q), like_output(q)


def save(ctx, inputs, output):
    q, k, v, _ = inputs
    ctx.save_for_backward(output[0], q, k, v, output[1])


def differentiate(ctx, dy, _):
    return *backward(dy, *ctx.saved_tensors), None


forward.register_autograd(differentiate, setup_context=save)
