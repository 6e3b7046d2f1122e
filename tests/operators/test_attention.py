"""Attention in blocks equals SDPA, also when compiled, and skips the products that the mask hides."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from nanoladder import machine
from nanoladder.errors import BadInput
from operators import attend_in_blocks, attention

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """Blocks of 8 queries, at most 5 of a sequence, a few heads at a time."""
    monkeypatch.setattr(attention, "block_size", lambda T, dtype: max(8, math.ceil(T / attention.MOST)))
    monkeypatch.setattr(attention, "MOST", 5)
    monkeypatch.setattr(attention, "CACHE", 8 * 8 * 40 * 4)


def inputs(T, B=3, nh=2, hs=8, dtype=torch.float64):
    """q, k and v (B, nh, T, hs), as views of one tensor (B, T, 3 · nh · hs), as in the model; then this tensor."""
    generator = torch.Generator().manual_seed(T)
    qkv = torch.randn(B, T, 3 * nh * hs, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return [part.transpose(1, 2) for part in qkv.unflatten(-1, (3, nh, hs)).unbind(2)], qkv


def results(function, T, **shape):
    """The output and the gradient of qkv."""
    parts, qkv = inputs(T, **shape)
    y = function(*parts)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    return y.detach(), torch.autograd.grad(y, qkv, weights)[0]


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def equals_sdpa(T, **shape):
    for ours, expected in zip(results(attend_in_blocks, T, **shape), results(sdpa, T, **shape), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(T=st.integers(1, 100), B=st.integers(1, 3), nh=st.integers(1, 7), hs=st.integers(1, 8))
def test_output_and_gradients_equal_sdpa(small, T, B, nh, hs):
    equals_sdpa(T, B=B, nh=nh, hs=hs)


def test_output_and_gradients_equal_sdpa_with_the_sizes_of_training():
    equals_sdpa(300)


def test_errors_in_bfloat16_are_no_larger_than_those_of_the_formula():
    def formula(q, k, v):
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(200, 200, dtype=bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ v

    exact = results(sdpa, 200)
    ours, theirs = (results(function, 200, dtype=torch.bfloat16) for function in (attend_in_blocks, formula))
    for a, b, expected in zip(ours, theirs, exact, strict=True):
        errors = [(found.double() - expected).norm() / expected.norm() for found in (a, b)]
        assert errors[0] < 0.02
        assert errors[0] < 1.2 * errors[1]


def test_products_that_the_mask_hides_are_not_computed(small):
    """15 of 5 × 5 pairs of blocks, in two products of the forward and four of the backward."""
    parts, _ = inputs(40)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        y, kept = attention.forward(*parts, True)
        attention.backward(y, *parts, kept)
    whole = 2 * 3 * 2 * 40 * 40 * 8  # FLOP of a product of all queries and keys
    assert counter.get_total_flops() == 6 * whole * 15 / 25
    assert kept.numel() == 3 * 2 * 40 * 40 * 15 / 25


def test_the_operators_pass_opcheck(small):
    (q, k, v), _ = inputs(19)
    torch.library.opcheck(attention.operator, (q, k, v, True), test_utils=["test_schema", "test_faketensor"])
    y, kept = attention.operator(q.detach(), k.detach(), v.detach(), True)
    args = tuple(part.detach() for part in (y, q, k, v, kept))
    torch.library.opcheck(attention.backward_operator, args, test_utils=["test_schema", "test_faketensor"])


@pytest.mark.slow
def test_traced_by_the_compiler_it_computes_the_same(small):
    traced = torch.compile(attend_in_blocks, backend="aot_eager", fullgraph=True, dynamic=False)
    for ours, theirs in zip(results(traced, 19), results(attend_in_blocks, 19), strict=True):
        assert torch.equal(ours, theirs)


def test_the_header_names_blocks_and_a_gpu_refuses_them():
    assert "as requested" in machine.attention_kernel(tiny(attention="blocks"), CPU)
    for device in ("cuda", "mps"):
        with pytest.raises(BadInput, match=r"attention=blocks is for CPUs.*--attention=sdpa"):
            machine.check(tiny(attention="blocks"), torch.device(device))
