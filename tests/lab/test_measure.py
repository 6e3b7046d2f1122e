"""Measurements of lab/measure.py count the right bytes, seconds and operations."""

import time
from types import SimpleNamespace

import pytest
import torch
from conftest import flags, needs_gpu, tiny
from torch.profiler import ProfilerActivity, profile

from lab import anatomy, limits, measure, pages
from nanoladder.config import load_config

LADDER = pages.fields("naive")
T, N, V = 16, 64, 40  # context, tokens of a batch, vocabulary


def event(name, parents=(), shapes=(), microseconds=0.0, device="CPU"):
    """An event of torch.profiler, as far as kind_of and seconds_by_kind read it."""
    above = None
    for parent in parents:
        above = SimpleNamespace(name=parent, cpu_parent=above)
    return SimpleNamespace(
        name=name,
        cpu_parent=above,
        input_shapes=shapes,
        cpu_time_total=3 * microseconds,
        self_cpu_time_total=microseconds,
        self_device_time_total=2 * microseconds,
        device_type=getattr(torch.autograd.DeviceType, device),
    )


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (event("aten::mm"), "gemm"),
        (event("aten::copy_", ["aten::linear", "aten::addmm"]), "gemm"),
        (event("aten::bmm"), "attention"),
        (event("aten::_softmax"), "attention"),
        (event("aten::masked_fill", shapes=[[4, 2, T, T], [T, T]]), "attention"),
        (event("aten::_scaled_dot_product_flash_attention_for_cpu_backward"), "attention"),
        (event("aten::_log_softmax_backward_data", ["LogSoftmaxBackward0"]), "loss"),
        (event("aten::_to_copy", shapes=[[N, V]]), "loss"),
        (event("aten::softmax", ["nanoladder::head_loss"]), "loss"),
        (event("aten::mm", ["nanoladder::head_loss"]), "gemm"),
        (event("triton_red_fused__log_softmax_nll_loss_3"), "loss"),
        (event("graph_0_cpp_fused_add_native_layer_norm_2"), "elementwise"),
        (event("aten::mul_", ["aten::_foreach_mul_"]), "optimizer"),
        (event("aten::mm", ["Optimizer.step#Muon.step"]), "optimizer"),
        (event("enumerate(DataLoader)", ["data wait"]), "data"),
        (event("aten::gelu"), "elementwise"),
    ],
)
def test_every_operator_has_its_kind(found, kind):
    assert anatomy.kind_of(found, tiny(context_length=T, batch_size=N // T, vocab_size=V)) == kind


def test_time_is_the_operators_on_a_cpu_and_their_kernels_on_a_gpu():
    events = [event("aten::mm", microseconds=250_000), event("aten::gelu", microseconds=125_000)]
    events.append(event("gemm_kernel", microseconds=250_000, device="CUDA"))  # counted where it was launched
    events += [event("data wait", microseconds=50_000), event("aten::copy_", ["data wait"], microseconds=1_000)]
    events += [event("step", microseconds=9_000), event("Torch-Compiled Region: 0/0", microseconds=9_000)]
    config = tiny(vocab_size=V)
    on_cpu = anatomy.seconds_by_kind(events, config, on_gpu=False)
    on_gpu = anatomy.seconds_by_kind(events, config, on_gpu=True)
    assert (on_cpu["gemm"], on_cpu["elementwise"], on_cpu["data"]) == (0.25, 0.125, pytest.approx(0.051))
    assert on_gpu["gemm"] == 0.5
    assert on_gpu["data"] == 0.15  # what the host waited, copies and all


def test_python_is_the_host_s_time(dense):
    loop = measure.Loop(tiny(dataset=str(dense)))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        loop.optimizer.zero_grad = lambda **_: time.sleep(0.2)
        loop.step()
    assert sum(anatomy.seconds_by_kind(profiler.events(), loop.config, on_gpu=False).values()) < 0.2


def memory_of(config, before_the_steps=lambda loop: None):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loop = measure.Loop(config)
        before_the_steps(loop)
        loop.step()
        loop.step()
    return anatomy.anatomy(loop, profiler)


def test_the_parts_add_up_and_the_peak_counts_every_allocation_once(dense):
    def two_tensors(*_):
        kept = torch.ones(1_000_000)
        torch.ones(5_000_000)
        assert len(kept) == 1_000_000

    config = tiny(dataset=str(dense), set_to_none=True)
    memory = memory_of(config, lambda loop: loop.optimizer.register_step_pre_hook(two_tensors))
    held = memory["weights"] + memory["optimizer"]
    assert held + memory["activations"] + memory["rest"] == memory["peak"]
    assert 0 < memory["peak"] - 24_000_000 - held - memory["gradients"] < 20_000  # a batch and a few scalars
    assert memory["activations"] == memory_of(config)["activations"]


def test_activations_grow_with_the_batch_and_the_weights_do_not(dense):
    small, large = (memory_of(tiny(dataset=str(dense), batch_size=size)) for size in (2, 8))
    assert 3.5 < large["activations"] / small["activations"] < 4.1
    for part in ("weights", "gradients", "optimizer"):
        assert small[part] == large[part] > 0


def test_an_8_bit_tensor_counts_its_parts():
    optim = pytest.importorskip("torchao.optim")
    layer = torch.nn.Linear(128, 64, bias=False)
    optimizer = optim.AdamW8bit(layer.parameters())
    layer.weight.grad = torch.ones_like(layer.weight)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    mean = optimizer.state[layer.weight]["exp_avg"]
    codes, scales, table = 64 * 128, 4 * 64 * 128 // 256, 4 * 256
    assert sum(part.nbytes for part in anatomy.plain(mean)) == codes + scales + table < mean.nbytes / 3
    assert anatomy.plain(layer.weight) == [layer.weight]


def test_a_run_that_diverges_ends_there(dense):
    found = measure.curve(tiny(dataset=str(dense), optimizer="sgd", learning_rate=1e30, grad_clip=0.0, max_steps=150))
    assert found["val_loss"] is None
    assert len(found["losses"]) == len(found["tokens"]) < 50


def test_the_machine_s_limits_are_positive_rates():
    found = limits.limits(torch.device("cpu"))
    assert found["flops"]["float32"] > 1e9
    assert found["flops"]["bfloat16"] > 1e8
    assert found["copy_bytes"] > 1e8


@pytest.fixture
def planted(monkeypatch):
    """planted(rates) gives products these FLOP/s by dtype, on a clock that only they and copies, of 0.3 s, move."""
    this = SimpleNamespace(now=0.0, rows=[])

    def plant(rates):
        def wait(seconds):
            this.now += seconds

        def product(n, dtype, device):
            this.rows.append(n)
            return lambda: wait(2 * n**3 / rates[dtype])

        monkeypatch.setattr(limits, "product", product)
        monkeypatch.setattr(limits, "copy", lambda size, device: lambda: wait(0.3))
        monkeypatch.setattr(limits, "synchronized_time", lambda device: this.now)
        return this

    return plant


@pytest.mark.parametrize(
    "device, flops, rows",
    [
        ("cpu", 5e7, 128),  # slower than any
        ("cpu", 0.5e9, 256),  # bfloat16 emulated with AVX2
        ("cpu", 3e9, 512),
        ("cpu", 40e9, 2048),  # one core in float32
        ("cpu", 2.5e12, 2048),  # AMX
        ("cuda", 2e12, 4096),
        ("cuda", 800e12, 8192),
    ],
)
def test_matrices_are_as_large_as_the_machine_is_fast(device, flops, rows, planted):
    planted({torch.bfloat16: flops})
    assert limits.largest_product(torch.bfloat16, torch.device(device)) == rows


def test_limits_take_a_few_seconds_where_bfloat16_is_emulated(planted):
    this = planted({torch.float32: 90e9, torch.bfloat16: 0.5e9})
    found = limits.limits(torch.device("cpu"))
    assert found["flops"] == {"float32": pytest.approx(90e9), "bfloat16": pytest.approx(0.5e9)}
    assert found["copy_bytes"] == pytest.approx(2 * 2**28 / 0.3)
    assert this.now < 8  # 2048 rows in bfloat16 took over ten minutes


@pytest.mark.parametrize("flops", [10.0**power for power in range(8, 16)])
def test_limits_take_a_few_seconds_on_any_machine(flops, planted):
    this = planted(dict.fromkeys([torch.float32, torch.bfloat16], flops))
    limits.limits(torch.device("cpu"))
    assert this.now < 10


def test_one_hiccup_does_not_make_the_matrices_smaller(planted, monkeypatch):
    slow_once = iter([2.0])
    this = planted({torch.float32: 1e12})
    product = limits.product

    def hiccup(n, dtype, device):
        action = product(n, dtype, device)

        def run():
            action()
            this.now += next(slow_once, 0.0) if n == 1024 else 0.0

        return run

    monkeypatch.setattr(limits, "product", hiccup)
    assert limits.largest_product(torch.float32, torch.device("cpu")) == 2048


def test_products_in_tf32_only_on_a_gpu():
    config = tiny(matmul_precision="high")
    assert anatomy.product_dtype(config, torch.device("cpu")) == "float32"
    assert anatomy.product_dtype(config, torch.device("cuda")) == "tf32"
    assert anatomy.product_dtype(tiny(dtype="bfloat16"), torch.device("cuda")) == "bfloat16"


@needs_gpu
@pytest.mark.parametrize("stage", ["naive", "flash", "chunked_loss"])
def test_on_a_gpu_memory_is_the_allocator_s_and_time_the_kernels(dense, stage):
    words = [*flags(device="cuda", batch_size=16, context_length=64, n_embd=128, dataset=dense), f"--stage={stage}"]
    measured = measure.examine(load_config([word for word in words if word.split("=")[0][2:] not in LADDER]))
    memory, seconds = measured["memory"], measured["seconds_by_kind"]
    held = memory["weights"] + memory["gradients"] + memory["optimizer"]
    assert held < memory["peak"] <= memory["reserved"]
    assert 0 < memory["activations"] < memory["peak"]
    assert memory["context"] > 50e6
    assert 0 < sum(seconds.values()) <= measured["profiled_seconds"]
    assert min(seconds["gemm"], seconds["attention"], seconds["optimizer"]) > 0
