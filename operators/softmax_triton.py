"""Softmax over rows of logits as one Triton kernel; softmax.py has the same function in PyTorch's operations.

One pass finds maximum and sum together (online softmax; Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867);
the second one, which writes the gradient, finds the row in the GPU's cache. Arithmetic limits it: so a thread
raises its maximum once for EACH logits, and only columns at the end of a row are compared with the row's width.
"""

import triton
import triton.language as tl

from operators.softmax import IGNORED

BLOCK_BYTES = 2**15  # of a row that a program works on at a time: with WARPS the fastest of nine pairs on an H200
WARPS = 32  # as many as there can be: then few programs run at a time, and all their rows stay in the cache
EACH = tl.constexpr(8)  # neighboring columns of a thread: 16 bytes in half precision


def softmax_(logits, columns, log_sums, picked, n_real, find=True, overwrite=True):
    """Same as softmax.softmax_, except that the logits must be contiguous and padding is left unchanged."""
    options = {"FIND": find, "OVERWRITE": overwrite, "num_warps": WARPS}
    options["BLOCK"] = BLOCK_BYTES // logits.itemsize
    head_loss_rows[(len(logits),)](logits, columns, log_sums, picked, logits.shape[1], n_real, IGNORED, **options)


@triton.jit
def add_exp(x, highest, total):
    """Adds logits (BLOCK,) to the threads' running maximum and Σ exp(x - maximum), (BLOCK / EACH,) each."""
    x = tl.reshape(x, [x.shape[0] // EACH, EACH])
    higher = tl.maximum(highest, tl.max(x, axis=1))
    return higher, total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher[:, None]), axis=1)


@triton.jit(do_not_specialize_on_alignment=["columns", "log_sums", "picked"])  # parts of longer ones, from any row on
def head_loss_rows(
    logits,
    columns,
    log_sums,
    picked,
    width: tl.constexpr,
    n_real: tl.constexpr,
    IGNORED: tl.constexpr,
    FIND: tl.constexpr,
    OVERWRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: finds its log-sum-exp (FIND) or reads it, and writes the gradient over it (OVERWRITE)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    whole: tl.constexpr = n_real // BLOCK * BLOCK  # columns in blocks without padding
    target = tl.load(columns + row)
    at_target = tl.load(logits + target, mask=target >= 0, other=0.0)
    if FIND:
        tl.store(picked + row, tl.where(target >= 0, at_target.to(tl.float32), 0.0))
        highest = tl.full([BLOCK // EACH], -3.0e38, tl.float32)  # not -inf: -inf - -inf is NaN
        total = tl.zeros([BLOCK // EACH], tl.float32)
        for start in range(0, whole, BLOCK):
            raw = tl.load(logits + start + tl.arange(0, BLOCK), eviction_policy="evict_last")
            highest, total = add_exp(raw.to(tl.float32), highest, total)
        if whole < n_real:
            column = whole + tl.arange(0, BLOCK)
            raw = tl.load(logits + column, mask=column < width, other=0.0, eviction_policy="evict_last")
            x = tl.where(column < n_real, raw.to(tl.float32), float("-inf"))
            highest, total = add_exp(x, highest, total)
        top = tl.max(highest)
        log_sum = tl.log(tl.sum(total * tl.exp(highest - top))) + top
        tl.store(log_sums + row, log_sum)
    else:
        log_sum = tl.load(log_sums + row)
    if OVERWRITE:
        shift = tl.where(target == IGNORED, float("inf"), log_sum)  # exp(x - inf) is 0
        tl.debug_barrier()  # all threads read the target's logit before any overwrites it
        for start in range(0, whole, BLOCK):
            column = start + tl.arange(0, BLOCK)
            raw = tl.load(logits + column, eviction_policy="evict_first")
            tl.store(logits + column, tl.exp(raw.to(tl.float32) - shift).to(logits.dtype.element_ty))
        for start in range(whole, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            raw = tl.load(logits + column, mask=column < width, other=0.0, eviction_policy="evict_first")
            gradient = tl.where(column < n_real, tl.exp(raw.to(tl.float32) - shift), 0.0)
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < width)
        tl.debug_barrier()  # the target's is written last
        d_target = tl.exp(at_target.to(tl.float32) - shift) - 1.0
        tl.store(logits + target, d_target.to(logits.dtype.element_ty), mask=target >= 0)
