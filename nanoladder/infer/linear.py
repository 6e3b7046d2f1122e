"""Matrix products of few rows, which are memory-bound: every weight is read once and multiplied a few times."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


def linears(model):
    """Lists the model's Linears that have a weight; int8 Linears have none."""
    return [module for module in model.modules() if isinstance(module, nn.Linear) and hasattr(module, "weight")]


def multiply(x, weight, bias):
    """x (..., C) times weight (R, C), plus bias -> (..., R). When compiled, a single row is a fused product and sum.

    That loop reads weights at memory speed. A library's matrix product, designed for many rows, reads them at half that
    speed or less.
    """
    if not torch.compiler.is_compiling() or x.numel() > weight.shape[1]:
        return F.linear(x, weight, bias)
    row = x.flatten().float().as_strided((weight.shape[1],), (1,))  # makes the compiler compute the row first:
    y = (weight.float() * row).sum(-1)  # else a norm before it is computed again for every output
    y = y if bias is None else y + bias
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def multiply_single_rows(model):
    """Makes every Linear of the model multiply by multiply()."""

    def forward(linear, x):
        return multiply(x, linear.weight, linear.bias)

    for linear in linears(model):
        linear.forward = partial(forward, linear)


def store_by_columns(model):
    """Stores float32 weights of every Linear with more outputs than inputs by columns.

    MKL then multiplies one to three rows by them 1.3 to 1.9 times as fast. Keeps shapes, and ties to an Embedding.
    """
    for linear in linears(model):
        if linear.out_features > linear.in_features:
            linear.weight.data = linear.weight.data.t().contiguous().t()
