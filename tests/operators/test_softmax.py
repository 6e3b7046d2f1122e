"""Softmax over rows of logits: PyTorch's operations against float64, and the Triton kernel in Triton's interpreter."""

import math
from importlib.util import find_spec

import pytest
import torch
from conftest import needs_gpu, run_interpreted

from operators import softmax

EXACT = 4e-6  # errors of sums of thousands of numbers: 1.1e-6 to 2.0e-6, depending on the CPU's vector length
ROUNDING = {torch.float32: EXACT, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # relative
DTYPES = list(ROUNDING)


def rows(n_columns, n_real, dtype, seed, device="cpu"):
    """Logits (7, n_columns), padding from n_real on too, and the columns of targets: the first, the last, none, any."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(7, n_columns, generator=generator)
    columns = torch.randint(n_real, (7,), generator=generator)
    columns[:4] = torch.tensor([0, n_real - 1, softmax.ELSEWHERE, softmax.IGNORED])
    return logits.to(device, dtype), columns.to(device)


def exact(logits, columns, n_real, log_sum=None):
    """Log-sum-exp, the logits at the columns and the gradient, by the formula, in float64."""
    x = logits[:, :n_real].double()
    log_sum = x.logsumexp(1) if log_sum is None else log_sum.double()
    here = (columns >= 0)[:, None]
    at = columns.clamp(min=0)[:, None]
    gradient = (x - log_sum[:, None]).exp() - torch.zeros_like(x).scatter(1, at, 1.0) * here
    gradient[columns == softmax.IGNORED] = 0
    return log_sum, torch.where(here, x.gather(1, at), 0.0)[:, 0], gradient


def check(softmax_, n_columns, n_real, dtype, seed, device="cpu", rounding=ROUNDING):
    """Asserts that softmax_ agrees with the formula, given log-sum-exp or not, and overwriting."""
    for find in (True, False):
        logits, columns = rows(n_columns, n_real, dtype, seed, device)
        log_sum, picked, gradient = exact(logits, columns, n_real)
        if not find:
            given = (log_sum + 0.5).float()  # of more columns than are here: no probability exceeds 1
            log_sum, picked, gradient = exact(logits, columns, n_real, given)
        for overwrite in (False, True):
            untouched = logits.clone()
            found = torch.full_like(log_sum, math.nan, dtype=torch.float32) if find else given.clone()
            at_target = torch.full_like(found, math.nan)
            softmax_(logits, columns, found, at_target, n_real, find=find, overwrite=overwrite)
            torch.testing.assert_close(found.double(), log_sum, rtol=EXACT, atol=EXACT)
            if find:
                torch.testing.assert_close(at_target.double(), picked, rtol=EXACT, atol=EXACT)
            if not overwrite:
                assert torch.equal(logits[:, :n_real], untouched[:, :n_real])
        torch.testing.assert_close(logits[:, :n_real].double(), gradient, rtol=rounding[dtype], atol=EXACT)
        assert torch.all(logits[:, n_real:] == 0)


SHAPES = [(1000, 1000), (5056, 5001), (300, 299), (4096, 10), (8200, 8199), (1, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 3000, 2**20])
def test_the_operations_equal_the_formula(dtype, block, monkeypatch):
    monkeypatch.setattr(softmax, "BLOCK", block)
    for shape in SHAPES:
        check(softmax.softmax_, *shape, dtype, seed=shape[0])


def check_shard_of_padding(softmax_):
    """Asserts that a shard without real columns contributes nothing, whatever its logits."""
    logits, columns = torch.ones(2, 8), torch.tensor([softmax.ELSEWHERE, softmax.IGNORED])
    log_sum, picked = torch.full((2, 2), math.nan)
    softmax_(logits, columns, log_sum, picked, 0, overwrite=False)
    assert log_sum.tolist() == [-math.inf] * 2 and picked.tolist() == [0, 0]
    softmax_(logits, columns, torch.ones(2), picked, 0, find=False)
    assert torch.all(logits == 0)


def check_not_numbers(softmax_):
    """Asserts that a NaN among a row's real logits, and no other, makes its log-sum-exp and its gradient NaN."""
    logits, columns = torch.zeros(3, 8), torch.zeros(3, dtype=torch.long)
    logits[0, 4] = logits[1, 7] = math.nan  # the latter is padding
    log_sum, picked = torch.zeros(2, 3)
    softmax_(logits, columns, log_sum, picked, 7)
    assert log_sum.isnan().tolist() == [True, False, False]
    assert logits[:, :7].isnan().all(1).tolist() == [True, False, False]


def test_not_a_number_stays_so():
    check_not_numbers(softmax.softmax_)


def test_a_shard_without_columns_adds_nothing():
    check_shard_of_padding(softmax.softmax_)


def test_targets_become_columns_of_a_shard():
    targets = torch.tensor([0, 9, 10, 14, 15, -100])
    found = softmax.target_columns(targets, ignore_index=-100, first_row=10, n_columns=5)
    elsewhere, ignored = softmax.ELSEWHERE, softmax.IGNORED
    assert found.tolist() == [elsewhere, elsewhere, 0, 4, elsewhere, ignored]
    assert targets.tolist() == [0, 9, 10, 14, 15, -100]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install triton")
def test_the_triton_kernel_equals_the_formula_in_the_interpreter():
    run_interpreted(__file__)


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (50304, 50257)])
def test_the_triton_kernel_equals_the_formula_on_a_gpu(dtype, shape):
    from operators import softmax_triton

    check(softmax_triton.softmax_, *shape, dtype, seed=0, device="cuda")


if __name__ == "__main__":  # in the interpreter, which Triton checks for when it is imported
    from operators import softmax_triton

    truncated = ROUNDING | {torch.bfloat16: 2**-7}  # the interpreter does not round
    check_shard_of_padding(softmax_triton.softmax_)
    check_not_numbers(softmax_triton.softmax_)
    for dtype in DTYPES:
        shapes = SHAPES if dtype == torch.float32 else SHAPES[1:3]  # in half precision each is within one block
        for n_columns, n_real in shapes:
            check(softmax_triton.softmax_, n_columns, n_real, dtype, seed=n_columns, rounding=truncated)
