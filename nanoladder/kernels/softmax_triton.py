"""Softmax over rows of logits as one Triton kernel; softmax.py has the same function in PyTorch's operations.

One pass finds maximum and sum together (online softmax; Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867);
the second one, which writes the gradient, finds the row in the GPU's cache.
"""

import triton
import triton.language as tl

from nanoladder.kernels.softmax import IGNORED

BLOCK = 4096  # columns that a program works on at a time: 8 of its threads each
WARPS = 16  # fewer programs at a time than with 8, so that all their rows stay in the cache


def softmax_(logits, columns, log_sums, picked, n_real, cap=0.0, find=True, overwrite=True):
    """Does what softmax.softmax_ does; the logits are contiguous, and padding stays too."""
    options = {"CAP": cap, "FIND": find, "OVERWRITE": overwrite, "BLOCK": BLOCK, "num_warps": WARPS}
    head_loss_rows[(len(logits),)](logits, columns, log_sums, picked, logits.shape[1], n_real, IGNORED, **options)


@triton.jit
def tanh(x):
    """By one exp, to an absolute error of 1e-7; that of the GPU's own instruction is bfloat16's."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit(do_not_specialize_on_alignment=["columns", "log_sums", "picked"])  # parts of longer ones, from any row on
def head_loss_rows(
    logits,
    columns,
    log_sums,
    picked,
    width: tl.constexpr,
    n_real: tl.constexpr,
    IGNORED: tl.constexpr,
    CAP: tl.constexpr,
    FIND: tl.constexpr,
    OVERWRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program a row: finds its log-sum-exp (FIND) or reads it, and writes the gradient over the row (OVERWRITE)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target = tl.load(columns + row)
    if FIND:
        at_target = tl.load(logits + target, mask=target >= 0, other=0.0).to(tl.float32)
        if CAP > 0.0:
            at_target = CAP * tanh(at_target / CAP)
        tl.store(picked + row, at_target)
        highest = tl.full([BLOCK], -3.0e38, tl.float32)  # not -inf: -inf less -inf is no number
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < width, other=0.0, eviction_policy="evict_last")
            x = x.to(tl.float32)
            if CAP > 0.0:
                x = CAP * tanh(x / CAP)
            x = tl.where(column < n_real, x, float("-inf"))
            higher = x > highest
            lower = tl.exp(-tl.abs(x - highest))  # of the two, beside the other's exp(0)
            total = tl.where(higher, total * lower + 1.0, total + lower)
            highest = tl.maximum(highest, x)
        top = tl.max(highest)
        log_sum = tl.log(tl.sum(total * tl.exp(highest - top))) + top
        tl.store(log_sums + row, log_sum)
    else:
        log_sum = tl.load(log_sums + row)
    if OVERWRITE:
        tl.debug_barrier()  # the target's logit is read by all before any of them overwrites it
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < width, other=0.0, eviction_policy="evict_first")
            x = x.to(tl.float32)
            if CAP > 0.0:
                limited = tanh(x / CAP)
                x = CAP * limited
            gradient = tl.where(column < n_real, tl.exp(x - log_sum), 0.0) - tl.where(column == target, 1.0, 0.0)
            if CAP > 0.0:
                gradient *= 1.0 - limited * limited
            gradient = tl.where(target == IGNORED, 0.0, gradient)
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < width)
