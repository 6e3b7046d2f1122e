"""What one process of profile.py measures."""

from types import SimpleNamespace

import pytest
import torch
from conftest import flags, tiny
from torch.profiler import ProfilerActivity, profile

import ladder
import measure
from config import load_config

LADDER = ladder.fields("naive")
T, N, V = 16, 64, 40  # context, tokens of a batch, vocabulary


def event(name, parents=(), shapes=(), microseconds=0.0, device="CPU"):
    """What kind_of and time_by_kind read of one event of torch.profiler."""
    above = None
    for parent in parents:
        above = SimpleNamespace(name=parent, cpu_parent=above)
    return SimpleNamespace(
        name=name,
        cpu_parent=above,
        input_shapes=shapes,
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
        (event("aten::exp_", ["ChunkedLoss"]), "loss"),
        (event("aten::mm", ["ChunkedLoss"]), "gemm"),
        (event("triton_red_fused__log_softmax_nll_loss_3"), "loss"),
        (event("graph_0_cpp_fused__to_copy_mul_ne_split_7"), "loss"),
        (event("graph_0_cpp_fused_add_native_layer_norm_2"), "elementwise"),
        (event("aten::mul_", ["aten::_foreach_mul_"]), "optimizer"),
        (event("aten::mm", ["Optimizer.step#Muon.step"]), "optimizer"),
        (event("enumerate(DataLoader)", ["data wait"]), "data"),
        (event("aten::gelu"), "elementwise"),
    ],
)
def test_every_operator_has_its_kind(found, kind):
    assert measure.kind_of(found, tiny(context_length=T, batch_size=N // T, vocab_size=V)) == kind


def test_the_shares_are_of_the_time_on_the_device():
    events = [event("aten::mm", microseconds=250_000), event("aten::gelu", microseconds=125_000)]
    events.append(event("gemm_kernel", microseconds=250_000, device="CUDA"))  # counted where it was launched
    config = tiny(vocab_size=V)
    on_cpu = measure.time_by_kind(events, 1.0, config, on_gpu=False)
    on_gpu = measure.time_by_kind(events, 1.0, config, on_gpu=True)
    assert (on_cpu["gemm"], on_cpu["elementwise"], on_cpu["host"]) == (0.25, 0.125, 0.625)
    assert (on_gpu["gemm"], on_gpu["elementwise"], on_gpu["host"]) == (0.5, 0.25, 0.25)


def memory_of(config, before_the_steps=lambda: None):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        this = measure.Run(config)
        before_the_steps()
        this.step()
        this.step()
    return measure.anatomy(this, profiler)


def test_the_peak_counts_every_allocation_once(dense):
    def two_tensors():
        kept = torch.ones(1_000_000)
        torch.ones(5_000_000)
        assert len(kept) == 1_000_000

    usual, planted = (memory_of(tiny(dataset=str(dense)), *before) for before in ([], [two_tensors]))
    assert planted["activations"] == usual["activations"]
    assert planted["peak"] == usual["weights"] + 24_000_000  # the two tensors were there beside the weights alone


def test_activations_grow_with_the_batch_and_the_weights_do_not(dense):
    small, large = (memory_of(tiny(dataset=str(dense), batch_size=size)) for size in (2, 8))
    assert 3.5 < large["activations"] / small["activations"] < 4.1
    for part in ("weights", "gradients", "optimizer"):
        assert small[part] == large[part] > 0


def test_the_machine_s_limits_are_positive_rates():
    found = measure.limits(torch.device("cpu"))
    assert found["flops"]["float32"] > 1e9
    assert found["flops"]["bfloat16"] > 1e8
    assert found["copy_bytes"] > 1e8


def test_products_in_tf32_only_on_a_gpu():
    config = tiny(matmul_precision="high")
    assert measure.product_dtype(config, torch.device("cpu")) == "float32"
    assert measure.product_dtype(config, torch.device("cuda")) == "tf32"
    assert measure.product_dtype(tiny(dtype="bfloat16"), torch.device("cuda")) == "bfloat16"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stage", ["naive", "flash", "chunked_loss"])
def test_on_a_gpu_memory_is_the_allocator_s_and_time_the_kernels(dense, stage):
    words = [*flags(device="cuda", batch_size=16, context_length=64, n_embd=128, dataset=dense), f"--stage={stage}"]
    measured = measure.examine(load_config([word for word in words if word.split("=")[0][2:] not in LADDER]))
    memory, shares = measured["memory"], measured["time_by_kind"]
    held = memory["weights"] + memory["gradients"] + memory["optimizer"]
    assert held < memory["peak"] <= memory["reserved"]
    assert 0 < memory["activations"] < memory["peak"]
    assert memory["context"] > 50e6
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares["gemm"], shares["attention"], shares["optimizer"], shares["host"]) > 0
