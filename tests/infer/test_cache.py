"""A text sees only its own tokens in the cache; the compiled step and single-row products compute the same."""

import math

import pytest
import torch
from conftest import RECIPE
from gpts import N_VOCAB, random_gpt, random_tokens
from torch import nn

from nanoladder.infer import CachedGPT
from nanoladder.infer.linear import multiply_single_rows


def step(model, windows):
    """Prefills all but each window's last token, runs a step with the last ones, and returns its logits."""
    model.prefill([window[:-1] for window in windows], list(range(len(windows))))
    return model.step([window[-1] for window in windows], [len(window) - 1 for window in windows])


@torch.inference_mode()
@pytest.mark.parametrize("keys", [{"attention": "matmul"}, {"attention": "sdpa"}, RECIPE])
def test_prefill_and_step_return_the_logits_of_the_model(keys):
    keys = {"bias": True, "pad_vocab_to": 64, **keys}
    gpt, windows = random_gpt(12, **keys), [random_tokens(n, seed=n) for n in (12, 3, 7)]
    expected = torch.stack([gpt.logits(torch.tensor([window]))[0, -1] for window in windows])
    before = torch.stack([gpt.logits(torch.tensor([window[:-1]]))[0, -1] for window in windows])
    model = CachedGPT(gpt, 3, 12)
    torch.testing.assert_close(model.prefill([window[:-1] for window in windows], [0, 1, 2]), before)
    torch.testing.assert_close(step(model, windows), expected)
    assert expected[:, N_VOCAB:].isneginf().all()  # or nothing, under a cap


@torch.inference_mode()
def test_a_text_sees_nothing_of_earlier_texts_in_its_row():
    """Values to the right of a text may be any finite number, and keys even NaN."""
    windows = [random_tokens(n, seed=n) for n in (8, 2, 5)]
    clean = step(CachedGPT(random_gpt(12), 3, 12), windows)
    model = CachedGPT(random_gpt(12), 3, 12)
    for keys, values in model.layers:
        keys.fill_(math.nan), values.fill_(3e38)
    assert torch.equal(step(model, windows), clean)


@torch.inference_mode()
def test_a_second_cache_can_take_over_the_model():
    gpt, windows = random_gpt(12), [random_tokens(5)]
    first = step(CachedGPT(gpt, 1, 12), windows)
    assert torch.equal(step(CachedGPT(gpt, 1, 12), windows), first)


@pytest.mark.parametrize(
    "n_rows, dtype, by_columns", [(1, torch.float32, True), (4, torch.float32, False), (1, torch.bfloat16, False)]
)
def test_few_rows_in_float32_read_weights_by_columns_and_stay_tied(n_rows, dtype, by_columns):
    gpt, expected = (random_gpt(12).to(dtype) for _ in range(2))
    CachedGPT(gpt, n_rows, 12)
    assert gpt.head.weight.is_contiguous() != by_columns
    assert gpt.head.weight is gpt.token_embedding.weight and torch.equal(gpt.head.weight, expected.head.weight)


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize(
    "n_rows, dtype, tolerance, rungs",
    [(3, torch.float32, 1e-5, {}), (1, torch.bfloat16, 0.1, {}), (2, torch.float32, 1e-5, RECIPE)],
)
def test_the_compiled_step_computes_the_same(n_rows, dtype, tolerance, rungs, traced):
    windows = [random_tokens(n, seed=n) for n in (8, 3, 5)][:n_rows]
    keys = {"bias": True, "pad_vocab_to": 64, **rungs}
    expected = step(CachedGPT(random_gpt(12, **keys).to(dtype), n_rows, 12), windows)
    model = CachedGPT(random_gpt(12, **keys).to(dtype), n_rows, 12, compile=True)
    found = step(model, windows)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    again = model.step([1] * n_rows, [len(window) for window in windows])  # another position, the same program
    assert again.isfinite()[:, :N_VOCAB].all() and not torch.equal(again, found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, bias", [(torch.float32, True), (torch.bfloat16, False)])
def test_products_of_a_single_row(dtype, bias, traced):
    torch.manual_seed(0)
    linear = nn.Linear(40, 30, bias=bias)
    x = torch.randn(1, 1, 40)
    exact = linear(x)
    linear = linear.to(dtype)
    plain = linear(x.to(dtype))
    multiply_single_rows(nn.Sequential(linear))
    assert "forward" in vars(linear) and torch.equal(linear(x.to(dtype)), plain)
    compiled = torch.compile(linear, dynamic=False)
    found = compiled(x.to(dtype))
    assert found.dtype == dtype and found.shape == (1, 1, 30)
    torch.testing.assert_close(found.float(), exact, rtol=0, atol=1e-6 if dtype == torch.float32 else 0.02)
    rows = torch.randn(3, 1, 40).to(dtype)
    torch.testing.assert_close(compiled(rows), linear(rows))
