"""Softmax over rows of logits, in PyTorch operations: the loss's parts, and its gradient written over the logits.

softmax_triton.py has the same function as one CUDA kernel.
"""

import math

import torch

ELSEWHERE, IGNORED = -1, -2  # instead of the target's column: it is in another shard, or there is no target
BLOCK = 2**20  # numbers that a CPU works on at a time: 4 MB of temporaries, which stay in its cache


def target_columns(targets, ignore_index, first_row, n_columns):
    """Token ids (N,) -> the columns (N,) of a shard of n_columns from token id first_row on; or ELSEWHERE, IGNORED."""
    columns = targets - first_row
    columns.masked_fill_((columns < 0) | (columns >= n_columns), ELSEWHERE)
    return columns.masked_fill_(targets == ignore_index, IGNORED)


def softmax_(logits, columns, log_sums, picked, n_real, find=True, overwrite=True, raised=None):
    """Softmax over the rows of logits (n, V); columns from n_real on are padding, of probability 0.

    find: writes, in float32, each row's log-sum-exp to log_sums (n,), and the logit at its column to picked (n,), 0 for
    no column. Else log_sums, over more columns than these, is used instead.

    overwrite: replaces the logits in place by the loss's gradient, softmax less one at the column; a row that is
    IGNORED becomes 0, if its logits are numbers. Else they stay, but for padding.

    raised: first added to the logits of each row, (V,).
    """
    size = max(1, BLOCK // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        block, column = logits[rows], columns[rows, None]
        x = block.float()
        if raised is not None:
            x = x + raised
        x[:, n_real:] = -math.inf
        at, here = column.clamp(min=0), column >= 0
        if find:
            picked[rows] = torch.where(here, x.gather(1, at), 0.0)[:, 0]
            probabilities = x.softmax(dim=1)
            # The largest logit's probability is 1 / Σ exp(x - max), so that one pass of exp serves both.
            top = x.amax(dim=1)  # -∞ if all columns are padding
            log_sums[rows] = torch.where(top == -math.inf, top, top - probabilities.amax(dim=1).log())
        else:
            probabilities = (x - log_sums[rows, None]).exp_()
        if overwrite:
            block.copy_(probabilities.scatter_add_(1, at, -here.float()).mul_((column != IGNORED).float()))
