"""Output head and cross-entropy in one operator, chunk by chunk: the logits of a whole batch never exist at once.

Each chunk's logits go into the same buffer. The loss is read from them, and its gradient overwrites them. One product
then gives the gradient of the chunk's hidden states, another adds to the gradient of the weight. All this happens in
the forward: the gradient of a sum does not depend on the backward, which only scales it.

To torch.compile this is one opaque operator. Unrolled into its graph, the chunks would save nothing: the compiler
defers the products, and keeps all logits until then.

Sources: Wijmans et al. 2024, "Cut Your Losses" (https://arxiv.org/abs/2411.09009); Hsu et al. 2024, "Liger Kernel"
(https://arxiv.org/abs/2410.10989).
"""

import functools
import math
from typing import Literal

import torch

from operators import softmax
from operators.float8 import to_float8
from operators.private import all_gather
from operators.register import register

FEW_BYTES = 256e6  # size of half-precision logits up to which loss_chunks=auto makes no chunks
TOKENS_PER_CHANNEL = 8  # in a chunk, for loss_chunks=auto


def count_chunks(loss_chunks: int | Literal["auto"], n_tokens: int, n_logits: int, n_channels: int) -> int:
    """Number of chunks for the logits (n_tokens, n_logits) of hidden states (n_tokens, n_channels); 0: no chunks.

    "auto" makes none of FEW_BYTES. Else a chunk has TOKENS_PER_CHANNEL · n_channels tokens, whatever the device and the
    batch: each chunk reads and writes the weight's gradient, 8 bytes a number, and its logits about five times, 2 bytes
    each, so that the gradient is a tenth of that traffic. A chunk's logits then take 16 bytes for each number of the
    head's weight, as much as the weight, its gradient and AdamW's two moments.
    """
    if loss_chunks != "auto":
        return loss_chunks
    if 2 * n_tokens * n_logits <= FEW_BYTES:
        return 0
    return math.ceil(n_tokens / (TOKENS_PER_CHANNEL * n_channels))


def head_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    n_vocab: int,
    n_chunks: int,
    ignore_index: int = -100,
    first_row: int = 0,
    group: str = "",
    float8: bool = False,
) -> torch.Tensor:
    """Summed cross-entropy () of the logits `hidden @ weight.T`, in nats, float32.

    hidden (N, C), weight (V, C), targets (N,), where ignore_index contributes no loss and no gradient; a target outside
    the vocabulary makes the loss infinite. Rows of the weight from n_vocab on are padding, of probability 0. Matrix
    products run in autocast's dtype; the weight's gradient is summed over the chunks in the weight's own. No temporary
    is larger than a chunk's logits (N / n_chunks, V) or the weight. In bfloat16 on a GPU from Hopper on, the loss of a
    token is exact up to 116 nats; a larger one counts as 116 to 128 (exp_triton.py).

    float8: exp_triton.py, where it runs, multiplies hidden states and weight in float8; the gradients' products stay in
    bfloat16. The width must be a multiple of 16.

    A shard of the vocabulary: first_row is the token id of the weight's first row, and group the name of the process
    group whose processes hold the other shards. Each process returns the whole loss and the gradient of its own rows;
    its gradient of the hidden states is its shard's part, which the caller sums over the group. A target outside the
    vocabulary then goes unnoticed.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    options = ignore_index, first_row, group, needs_grad, float8
    return operator(hidden, weight, targets, n_vocab, n_chunks, *options)[0]


def compute(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    n_vocab: int,
    n_chunks: int,
    ignore_index: int,
    first_row: int,
    group: str,
    needs_grad: bool,
    float8: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator. Returns the loss and the gradients of hidden and weight: empty if not needs_grad."""
    n_real = min(max(n_vocab - first_row, 0), len(weight))  # rows of the weight that are not padding
    columns = softmax.target_columns(targets, ignore_index, first_row, n_real)
    products_weight = weight.to(hidden.dtype)
    d_hidden = torch.empty_like(hidden) if needs_grad else hidden.new_empty(0)
    d_weight = torch.zeros_like(weight) if needs_grad else weight.new_empty(0)
    size = math.ceil(len(hidden) / n_chunks)
    if takes_exponentials(hidden, weight):
        losses = by_exponentials(hidden, products_weight, columns, n_real, size, group, d_hidden, d_weight, float8)
    else:
        losses = by_softmax(hidden, products_weight, columns, n_real, size, group, d_hidden, d_weight)
    if not group:
        losses.masked_fill_(columns == softmax.ELSEWHERE, math.inf)
    return losses.masked_fill_(columns == softmax.IGNORED, 0.0).sum(), d_hidden, d_weight


def by_softmax(hidden, weight, columns, n_real, size, group, d_hidden, d_weight):
    """The losses (N,), by a softmax over the logits of `size` tokens at a time; the gradients too, unless empty."""
    softmax_pass = fastest_softmax(hidden.is_cuda)
    log_sums, picked = torch.empty(2, len(hidden), device=hidden.device)
    needs_grad = len(d_hidden) > 0
    buffer = hidden.new_empty(min(size, len(hidden)), len(weight))
    for start in range(0, len(hidden), size):
        chunk = slice(start, start + size)
        h, of_chunk = hidden[chunk], (columns[chunk], log_sums[chunk], picked[chunk], n_real)
        logits = torch.mm(h, weight.T, out=buffer[: len(h)])  # (n, V)
        softmax_pass(logits, *of_chunk, overwrite=needs_grad and not group)
        if group:
            join_shards(log_sums[chunk], picked[chunk], group)
            if needs_grad:
                softmax_pass(logits, *of_chunk, find=False)
        if needs_grad:
            torch.mm(logits, weight, out=d_hidden[chunk])
            add_product(d_weight, logits.T, h)
    return log_sums.sub_(picked)


def by_exponentials(hidden, weight, columns, n_real, size, group, d_hidden, d_weight, float8):
    """Does the same with exp_triton, without a pass over the logits, which are exponentials from the start."""
    kernels = exponential_kernels()
    factors, scale = (hidden, weight), None
    if float8:
        factors, scales = zip(to_float8(hidden), to_float8(weight), strict=True)
        scale = scales[0] * scales[1]
    shifts = kernels.target_logits(*factors, columns, scale)
    if group:
        shifts = all_gather(shifts[None], 0, group).sum(0)
    sums = torch.empty_like(shifts)
    needs_grad = len(d_hidden) > 0
    buffer = hidden.new_empty(min(size, len(hidden)), len(weight))
    scaled = torch.empty_like(hidden[:size])
    for start in range(0, len(hidden), size):
        chunk = slice(start, start + size)
        h = hidden[chunk]
        exponentials = buffer[: len(h)]  # (n, V)
        options = shifts[chunk], n_real, exponentials, scale, needs_grad
        parts = kernels.exp_logits(factors[0][chunk], factors[1], *options)  # (n, tiles)
        if group:
            parts = all_gather(parts.sum(1)[None], 0, group).T.contiguous()  # (n, shards)
        if needs_grad:
            kernels.finish(exponentials, columns[chunk], parts, sums[chunk], h, scaled)
            torch.mm(exponentials, weight, out=d_hidden[chunk])
            add_product(d_weight, exponentials.T, scaled[: len(h)])
        else:
            torch.sum(parts, 1, out=sums[chunk])
    if needs_grad:
        d_hidden /= sums[:, None]
    return kernels.losses(sums)


def join_shards(log_sum, picked, group):
    """Replaces log-sum-exp (n,) and the target's logit (n,) by their values over all shards of the vocabulary."""
    gathered = all_gather(torch.stack([log_sum, picked])[None], 0, group)  # (shards, 2, n)
    log_sum.copy_(gathered[:, 0].logsumexp(0))
    picked.copy_(gathered[:, 1].sum(0))


def add_product(total, a, b):
    """total += a @ b, summed in the total's dtype; a CPU first rounds the product to the dtype of a and b."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        size = math.ceil(softmax.BLOCK / b.shape[1])
        for rows, part in zip(total.split(size), a.split(size), strict=True):
            rows += part @ b


def fastest_softmax(is_cuda):
    """softmax.softmax_, as one kernel on a GPU if Triton can launch it."""
    if not is_cuda or triton_obstacle():
        return softmax.softmax_
    from operators import softmax_triton

    return softmax_triton.softmax_


def takes_exponentials(hidden, weight):
    """True if exp_triton's kernels run: they need a GPU from Hopper on, for its tile copies (TMA)."""
    if not hidden.is_cuda or torch.cuda.get_device_capability() < (9, 0):
        return False
    return suits_exponentials(hidden, weight) and not triton_obstacle()


def suits_exponentials(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """True if exp_triton supports these tensors: bfloat16, with rows aligned to 16 bytes."""
    return hidden.dtype == torch.bfloat16 and len(weight) % 8 == weight.shape[1] % 8 == 0


def exponential_kernels():
    """exp_triton, which only a machine with Triton can import."""
    from operators import exp_triton

    return exp_triton


@functools.cache
def triton_obstacle() -> str:
    """Returns the reason why the softmax's Triton kernel cannot run on this GPU, or ""; launches it once to find out.

    Triton may be absent; its launcher needs a C compiler, its kernel one of the GPUs that it supports.
    """
    try:
        from operators import softmax_triton

        column = torch.zeros(1, dtype=torch.long, device="cuda")
        logits, log_sum, picked = torch.zeros(3, 1, 1, device="cuda")
        softmax_triton.softmax_(logits, column, log_sum[0], picked[0], n_real=1)
    except Exception as error:  # of Triton, the C compiler, the assembler or the driver
        return f"{error or type(error).__name__}".strip().partition("\n")[0]
    return ""


def empty_results(hidden, weight, targets, n_vocab, n_chunks, ignore_index, first_row, group, needs_grad, float8=False):
    return empty_gradients(hidden, weight, needs_grad)


def empty_gradients(hidden, weight, needs_grad):
    """Empty tensors like the loss and the gradients of hidden and weight."""
    loss = hidden.new_empty((), dtype=torch.float32)
    if needs_grad:
        return loss, torch.empty_like(hidden), torch.empty_like(weight)
    return loss, hidden.new_empty(0), weight.new_empty(0)


def keep_gradients(ctx, inputs, output):
    ctx.n_inputs = len(inputs)
    ctx.set_materialize_grads(False)  # the gradients' own gradients: zeros of the size of hidden and weight
    ctx.save_for_backward(*output[1:])


def backward(ctx, d_loss, *_):
    """Scales the gradients in place: a copy of the weight's would raise the peak. PyTorch refuses a second backward."""
    d_hidden, d_weight = ctx.saved_tensors
    return d_hidden.mul_(d_loss), d_weight.mul_(d_loss), *[None] * (ctx.n_inputs - 2)


# A new signature needs a new name: compiled code in the compiler's cache calls the operator by its old name.
operator = register("nanoladder::chunked_loss", compute, empty_results, backward, keep_gradients)
