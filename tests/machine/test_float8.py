"""Linears of the blocks in float8: of the rounded numbers exactly, and refused on devices without such products."""

import dataclasses
import math

import pytest
import torch
from conftest import refusal, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT
from nanoladder import checkpoint, machine
from nanoladder.machine import device as devices
from nanoladder.machine.float8 import Float8Linear, Float8Product
from nanoladder.run import header
from operators.float8 import GRADIENT, INPUT, to_float8
from operators.private import scaled_mm

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))
multiply = Float8Product.apply


def error(ours, theirs):
    """Relative error of a tensor."""
    return float((ours.detach().double() - theirs).norm() / theirs.norm())


def factors(dtype=torch.float32, seed=0):
    """x (48, 64), weight (32, 64) and the gradient of their product (48, 32)."""
    generator = torch.Generator().manual_seed(seed)
    x, weight, dy = (torch.randn(*shape, generator=generator) for shape in ((48, 64), (32, 64), (48, 32)))
    return 3 * x.to(dtype).requires_grad_(), (0.02 * weight).requires_grad_(), 1e-6 * dy.to(dtype)


def rounded(x, dtype=INPUT):
    """The numbers that are multiplied instead of x, in float64."""
    values, scale = to_float8(x.detach(), dtype)
    return values.double() * scale.double()


class Calls(TorchDispatchMode):
    """Records the dtypes of the factors of each scaled product."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is scaled_mm:
            self.seen.append((args[0].dtype, args[1].dtype))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [INPUT, GRADIENT])
def test_a_scale_makes_the_largest_number_the_dtype_s_largest(dtype):
    for size in (1e-20, 1.0, 1e20):
        x = size * torch.tensor([[1.0, -2.0, 0.5]])
        values, scale = to_float8(x, dtype)
        assert values.dtype == dtype and values.float().abs().max() == torch.finfo(dtype).max
        torch.testing.assert_close(values.float() * scale, x, rtol=2**-3, atol=0)
    assert to_float8(torch.zeros(2, 2), dtype)[0].float().eq(0).all()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tensor", [0, 1])
def test_a_number_that_is_not_finite_reaches_the_product(number, tensor):
    pair = factors()[:2]
    with torch.no_grad():
        pair[tensor][3, 5] = number
        assert not multiply(*pair).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_three_products_are_of_float8_and_as_exact_as_its_rounding(dtype):
    x, weight, dy = factors(dtype)
    with Calls() as calls:
        y = multiply(x, weight)
        found = y, *torch.autograd.grad(y, (x, weight), dy)
    assert calls.seen == [(INPUT, INPUT), (GRADIENT, INPUT), (GRADIENT, INPUT)]
    assert [tensor.dtype for tensor in found] == [dtype, dtype, torch.float32]
    whole = x.detach().double(), weight.detach().double(), dy.double()
    parts = rounded(x), rounded(weight), rounded(dy, GRADIENT)
    for bound, ours, of_rounded, exact in zip((0.05, 0.08, 0.08), found, *map(products, (parts, whole)), strict=True):
        assert error(ours, of_rounded) < (1e-5 if ours.dtype == torch.float32 else 2**-8)
        assert bound / 4 < error(ours, exact) < bound


def products(tensors):
    x, weight, dy = tensors
    return x @ weight.T, dy @ weight, dy.T @ x


@pytest.mark.slow
def test_it_compiles_into_one_graph_with_the_same_products():
    x, weight, _ = factors()
    compiled = torch.compile(multiply, fullgraph=True, dynamic=False, backend="aot_eager")
    results = []
    for function in (compiled, multiply):
        y = function(x, weight)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# -- layers


def test_only_the_blocks_multiply_in_float8_and_parameters_stay():
    gpt = GPT(tiny(vocab_size=64, bias=True))
    before = dict(gpt.named_parameters())
    machine.use_float8(gpt.blocks)
    after = dict(gpt.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    kinds = {name: type(module) for name, module in gpt.named_modules() if isinstance(module, torch.nn.Linear)}
    assert kinds.pop("head") is torch.nn.Linear
    assert len(kinds) == 8 and set(kinds.values()) == {Float8Linear}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_returns_autocast_s_dtype_as_any_linear(dtype):
    layers = torch.nn.Sequential(torch.nn.Linear(32, 48))
    x = torch.randn(2, 16, 32)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        exact = layers(x)
        machine.use_float8(layers)
        found = layers(x)
    assert found.dtype == exact.dtype == dtype and found.shape == exact.shape
    assert 0 < (found - exact).norm() < 0.06 * exact.norm()


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_gpus_before_hopper_are_refused(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(devices, "attention_kernel", lambda *_: "flash")
    if capability >= (9, 0):
        assert machine.check(tiny(float8=True), CUDA) == "flash"
    else:
        this_one = "{}.{}".format(*capability)
        assert refusal(machine.check, tiny(float8=True), CUDA) == (
            f"float8=True: it needs a GPU from Hopper on (compute capability 9.0), and this one has {this_one}; "
            "expected --float8=False"
        )
        assert machine.check(tiny(), CUDA) == "flash"


def test_devices_that_have_not_been_tried_are_refused(monkeypatch):
    assert "not been tried on mps" in refusal(machine.check, tiny(float8=True, attention="sdpa"), MPS)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "not been tried on ROCm" in machine.float8_obstacle(CUDA)
    assert machine.float8_obstacle(CPU) == ""


def test_a_model_from_a_checkpoint_computes_without_float8():
    """Evaluation and samples by the other scripts."""
    config = tiny(vocab_size=64, float8=True)
    gpt = checkpoint.build_gpt({"config": dataclasses.asdict(config), "model": GPT(config).state_dict()}, "a run")
    assert not gpt.config.float8 and not any(isinstance(module, Float8Linear) for module in gpt.modules())


@pytest.mark.parametrize(
    "device, keys, said",
    [
        (CPU, {}, "blocks (emulated here, and slow)"),
        (CUDA, {}, "blocks and logits"),
        (CUDA, {"loss_chunks": 0}, "blocks"),
        (CUDA, {"dtype": "float16"}, "blocks"),
    ],
    ids=str,
)
def test_the_header_says_what_is_multiplied_in_float8(device, keys, said, monkeypatch):
    monkeypatch.setattr(header, "triton_obstacle", lambda: "")
    config = tiny(**{"vocab_size": 50304, "loss_chunks": 2, "dtype": "bfloat16", "float8": True, **keys})
    assert header.float8(config, device) == said
