"""Softmax over rows of logits as one Triton kernel; softmax.py has the same function in PyTorch's operations.

One pass finds maximum and sum together (online softmax; Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867);
the second one, which writes the gradient, finds the row in the GPU's cache.
"""

import torch
import triton
import triton.language as tl

from nanoladder.kernels.softmax import IGNORED

BLOCK = 4096  # columns that a program works on at a time: 8 of its threads each
WARPS = 16  # fewer programs at a time than with 8, so that all their rows stay in the cache


def softmax_(logits, columns, log_sum=None, overwrite=True):
    """Does what softmax.softmax_ does; the logits are contiguous."""
    found = torch.empty(len(logits), device=logits.device) if log_sum is None else log_sum
    picked = torch.empty_like(found)
    options = {"FIND": log_sum is None, "OVERWRITE": overwrite, "BLOCK": BLOCK, "num_warps": WARPS}
    head_loss_rows[(len(logits),)](logits, columns, found, picked, logits.shape[1], IGNORED, **options)
    return found, picked


@triton.jit
def head_loss_rows(
    logits,
    columns,
    log_sums,
    picked,
    width: tl.constexpr,
    IGNORED: tl.constexpr,
    FIND: tl.constexpr,
    OVERWRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program a row: finds its log-sum-exp (FIND) or reads it, and writes the gradient over the row (OVERWRITE)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target = tl.load(columns + row)
    at_target = tl.load(logits + target, mask=target >= 0, other=0.0).to(tl.float32)
    tl.store(picked + row, at_target)
    if FIND:
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < width, other=float("-inf"), eviction_policy="evict_last")
            x = x.to(tl.float32)
            higher = tl.maximum(highest, x)
            finite = tl.where(higher == float("-inf"), 0.0, higher)  # -inf less -inf is no number
            total = total * tl.exp(highest - finite) + tl.exp(x - finite)
            highest = higher
        top = tl.max(highest)
        finite = tl.where(top == float("-inf"), 0.0, top)
        log_sum = tl.log(tl.sum(total * tl.exp(highest - finite))) + finite
        tl.store(log_sums + row, log_sum)
    else:
        log_sum = tl.load(log_sums + row)
    if OVERWRITE:
        tl.debug_barrier()  # the target's logit is read by all before any of them overwrites it
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < width, other=float("-inf"), eviction_policy="evict_first")
            gradient = tl.exp(x.to(tl.float32) - log_sum) - tl.where(column == target, 1.0, 0.0)
            gradient = tl.where(target == IGNORED, 0.0, gradient)
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < width)
