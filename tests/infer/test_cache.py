"""The cache hides all but a text's own tokens; the compiled step and products of single rows compute the same."""

import math

import pytest
import torch
from gpts import N_VOCAB, random_gpt, random_tokens
from torch import nn

from nanoladder.infer import CachedGPT
from nanoladder.infer.linear import RowLinear, multiply_single_rows


def step(model, windows):
    """Prefills all windows but their last token, steps with that, and returns the logits."""
    model.prefill([window[:-1] for window in windows], list(range(len(windows))))
    return model.step([window[-1] for window in windows], [len(window) - 1 for window in windows])


@torch.inference_mode()
@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
def test_prefill_and_step_return_the_logits_of_the_model(attention):
    keys = {"attention": attention, "bias": True, "pad_vocab_to": 64}
    gpt, windows = random_gpt(12, **keys), [random_tokens(n, seed=n) for n in (12, 3, 7)]
    expected = torch.stack([gpt.logits(torch.tensor([window]))[0, -1] for window in windows])
    before = torch.stack([gpt.logits(torch.tensor([window[:-1]]))[0, -1] for window in windows])
    model = CachedGPT(gpt, 3, 12)
    torch.testing.assert_close(model.prefill([window[:-1] for window in windows], [0, 1, 2]), before)
    torch.testing.assert_close(step(model, windows), expected)
    assert expected[:, N_VOCAB:].isneginf().all()


@torch.inference_mode()
def test_a_text_sees_nothing_of_those_that_were_in_its_row():
    """What lies right of a text may be any finite number, and its keys even not a number."""
    windows = [random_tokens(n, seed=n) for n in (8, 2, 5)]
    clean = step(CachedGPT(random_gpt(12), 3, 12), windows)
    model = CachedGPT(random_gpt(12), 3, 12)
    for keys, values in model.layers:
        keys.fill_(math.nan), values.fill_(3e38)
    assert torch.equal(step(model, windows), clean)


@torch.inference_mode()
def test_rows_can_be_filled_in_any_order_and_copied():
    one, two = random_tokens(4, seed=1), random_tokens(6, seed=2)
    model = CachedGPT(random_gpt(12), 3, 12)
    model.prefill([two, one], [2, 0])
    model.copy(0, 1)
    logits = model.step([5, 5, 7], [4, 4, 6])
    expected = [CachedGPT(random_gpt(12), 1, 12).prefill([window], [0])[0] for window in ([*one, 5], [*two, 7])]
    torch.testing.assert_close(logits, torch.stack([expected[0], *expected]))


@torch.inference_mode()
def test_a_second_cache_takes_the_model_over():
    gpt, windows = random_gpt(12), [random_tokens(5)]
    first = step(CachedGPT(gpt, 1, 12), windows)
    assert torch.equal(step(CachedGPT(gpt, 1, 12), windows), first)


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("n_rows, dtype, tolerance", [(3, torch.float32, 1e-5), (1, torch.bfloat16, 0.1)])
def test_the_compiled_step_computes_the_same(n_rows, dtype, tolerance, traced):
    windows = [random_tokens(n, seed=n) for n in (8, 3, 5)][:n_rows]
    keys = {"bias": True, "pad_vocab_to": 64}
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
    assert type(linear) is RowLinear and torch.equal(linear(x.to(dtype)), plain)
    compiled = torch.compile(linear, dynamic=False)
    found = compiled(x.to(dtype))
    assert found.dtype == dtype and found.shape == (1, 1, 30)
    torch.testing.assert_close(found.float(), exact, rtol=0, atol=1e-6 if dtype == torch.float32 else 0.02)
    rows = torch.randn(3, 1, 40).to(dtype)
    torch.testing.assert_close(compiled(rows), linear(rows))
