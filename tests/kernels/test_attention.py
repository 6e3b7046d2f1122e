"""Attention in blocks: equal to SDPA, compiled too, and without the products that the mask hides."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import build, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import train
from nanoladder import machine
from nanoladder.errors import BadInput
from nanoladder.kernels import attend_in_blocks, attention, uses_blocks

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


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(T=st.integers(1, 100), B=st.integers(1, 3), nh=st.integers(1, 7), hs=st.integers(1, 8))
def test_output_and_gradients_equal_sdpa(small, T, B, nh, hs):
    equals_sdpa(T, B=B, nh=nh, hs=hs)


def test_output_and_gradients_equal_sdpa_with_the_sizes_of_training():
    equals_sdpa(300)


def test_in_bfloat16_it_errs_no_more_than_the_formula():
    def formula(q, k, v):
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(200, 200, dtype=bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ v

    exact = results(sdpa, 200)
    ours, theirs = (results(function, 200, dtype=torch.bfloat16) for function in (attend_in_blocks, formula))
    for a, b, expected in zip(ours, theirs, exact, strict=True):
        errors = [(found.double() - expected).norm() / expected.norm() for found in (a, b)]
        assert errors[0] < 0.02
        assert errors[0] < 1.2 * errors[1]


def test_only_products_that_the_mask_shows_are_computed(small):
    """Of 5 × 5 pairs of blocks 15; in the forward two products, in the backward four."""
    parts, _ = inputs(40)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        y, kept = attention.forward(*parts, True)
        attention.backward(y, *parts, kept)
    whole = 2 * 3 * 2 * 40 * 40 * 8  # FLOP of a product of all queries and keys
    assert counter.get_total_flops() == 6 * whole * 15 / 25
    assert kept.numel() == 3 * 2 * 40 * 40 * 15 / 25


def test_the_operators_keep_what_they_promise_the_compiler(small):
    (q, k, v), _ = inputs(19)
    torch.library.opcheck(attention.operator, (q, k, v, True), test_utils=["test_schema", "test_faketensor"])
    y, kept = attention.operator(q.detach(), k.detach(), v.detach(), True)
    args = tuple(part.detach() for part in (y, q, k, v, kept))
    torch.library.opcheck(attention.backward_operator, args, test_utils=["test_schema", "test_faketensor"])


def loss_and_gradients(**keys):
    config = tiny(vocab_size=50, context_length=20, **keys)
    model = build(config)[0]
    tokens = torch.arange(3 * 21).view(3, 21) * 7 % 50
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("checkpointing", ["none", "every:1", "selective"])
def test_the_model_computes_the_same_with_blocks(small, checkpointing):
    keys = {"dtype": "float32", "checkpointing": checkpointing}
    expected = loss_and_gradients(attention="sdpa", dtype="float32")
    for ours, theirs in zip(loss_and_gradients(attention="blocks", **keys), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_traced_by_the_compiler_it_computes_the_same(small):
    traced = torch.compile(attend_in_blocks, backend="aot_eager", fullgraph=True, dynamic=False)
    for ours, theirs in zip(results(traced, 19), results(attend_in_blocks, 19), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("checkpointing, calls", [("none", 2), ("every:1", 4), ("selective", 2)])
def test_selective_checkpointing_keeps_its_output(checkpointing, calls):
    class Count(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.found += operator is torch.ops.nanoladder.attend.default
            return operator(*args, **(kwargs or {}))

    with Count() as count:
        loss_and_gradients(attention="blocks", n_layer=2, checkpointing=checkpointing)
    assert count.found == calls


def test_the_header_names_blocks_and_a_gpu_refuses_them(refused, tmp_path):
    assert "as requested" in machine.attention_kernel(tiny(attention="blocks"), CPU)
    for device in ("cuda", "mps"):
        with pytest.raises(BadInput, match=r"attention=blocks is for CPUs.*--attention=sdpa"):
            machine.check(tiny(attention="blocks"), torch.device(device))
    line = refused(train.main, f"--out_dir={tmp_path}", "--attention=blocks", "--dropout=0.1")
    assert "dropout=0.1" in line and "--attention=auto" in line


@pytest.mark.parametrize(
    "keys, device_type, expected",
    [
        ({}, "cpu", True),
        ({"dtype": "float32", "context_length": 256}, "cpu", True),
        ({"dtype": "float32", "context_length": 1025}, "cpu", False),
        ({"dtype": "float16", "context_length": 512}, "cpu", False),
        ({"dropout": 0.1}, "cpu", False),
        ({}, "cuda", False),
        ({"attention": "sdpa"}, "cpu", False),
    ],
    ids=str,
)
def test_auto_takes_blocks_if_they_take_less_time(keys, device_type, expected):
    config = tiny(**{"attention": "auto", "dtype": "bfloat16", **keys})
    assert uses_blocks(config, device_type, getattr(torch, config.dtype)) == expected
    if device_type == "cpu":
        assert ("blocks" in machine.attention_kernel(config, CPU)) == expected
