"""Measurements of lab/measure/measurements.py count the right bytes, seconds and operations."""

from types import SimpleNamespace

import pytest
import torch
from conftest import flags, needs_gpu, tiny
from torch.profiler import ProfilerActivity, profile

import train
from lab.measure import breakdown, measurements
from nanoladder.config import stages
from nanoladder.run import load_config

LADDER = stages.fields("naive")
T, N, V = 16, 64, 40  # context, tokens of a batch, vocabulary
FAST = {"dtype": "bfloat16", "adamw_impl": "fused", "set_to_none": True, "lazy_metrics": True}


def event(name, parents=(), shapes=(), microseconds=0.0, device="CPU", id=0, is_user_annotation=False):
    """Fake event of torch.profiler, with the attributes that kind_of and seconds_by_kind read."""
    above = None
    for parent in parents:
        above = parent if isinstance(parent, SimpleNamespace) else event(parent, [above] if above else [])
    return SimpleNamespace(
        id=id,
        name=name,
        cpu_parent=above,
        input_shapes=shapes,
        cpu_time_total=3 * microseconds,
        self_cpu_time_total=microseconds,
        self_device_time_total=2 * microseconds,
        device_type=getattr(torch.autograd.DeviceType, device),
        is_user_annotation=is_user_annotation,
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
        (event("aten::_softmax", ["aten::softmax", "nanoladder::chunked_loss"]), "loss"),
        (event("aten::mm", ["nanoladder::chunked_loss"]), "gemm"),
        (event("triton_red_fused__log_softmax_nll_loss_3"), "loss"),
        (event("graph_0_cpp_fused_add_native_layer_norm_2"), "elementwise"),
        (event("aten::mul_", ["aten::_foreach_mul_"]), "optimizer"),
        (event("aten::mm", ["Optimizer.step#Muon.step"]), "optimizer"),
        (event("enumerate(DataLoader)", ["data wait"]), "data"),
        (event("aten::gelu"), "elementwise"),
    ],
)
def test_every_operator_has_its_kind(found, kind):
    assert breakdown.kind_of(found, tiny(context_length=T, batch_size=N // T, vocab_size=V)) == kind


def test_time_is_the_operators_on_a_cpu():
    events = [event("aten::mm", microseconds=250_000), event("aten::gelu", microseconds=125_000)]
    events += [event("data wait", microseconds=50_000), event("aten::copy_", ["data wait"], microseconds=1_000)]
    events += [event("step", microseconds=9_000), event("Torch-Compiled Region: 0/0", microseconds=9_000)]
    seconds = breakdown.seconds_by_kind(events, tiny(vocab_size=V), on_gpu=False)
    assert (seconds["gemm"], seconds["elementwise"], seconds["data"]) == (0.25, 0.125, pytest.approx(0.051))


def launched(name, operators):
    """A kernel, the call that launched it, and the operators around that call, the outermost first."""
    *outer, inner = operators
    call = event("cudaLaunchKernel", [event(inner, outer)], id=1, microseconds=7)
    return [call, event(name, microseconds=100_000, device="CUDA", id=1)]


REPLAYED = ["step", "Torch-Compiled Region: 0/1", "CompiledFunction"]  # around a cudaGraphLaunch
KERNELS = {
    "vectorized_elementwise_kernel<4, gelu>": (["step", "aten::gelu"], "elementwise"),
    "elementwise_kernel<128, mul>": (["Optimizer.step#AdamW.step", "aten::mul_"], "optimizer"),
    "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32": (["aten::matmul", "aten::bmm"], "attention"),
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN": (REPLAYED, "gemm"),
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>": (REPLAYED, "gemm"),
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>": (REPLAYED, "gemm"),
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<64>": (
        REPLAYED,
        "attention",
    ),
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)": (REPLAYED, "attention"),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x64": (REPLAYED, "attention"),
    "triton_red_fused__log_softmax__to_copy_nll_loss_forward_7": (REPLAYED, "loss"),
    "head_loss_rows": (REPLAYED, "loss"),
    "head_loss_gemm": (["nanoladder::chunked_loss"], "gemm"),
    "head_loss_finish": (REPLAYED, "loss"),
    "triton_per_fused_add_native_layer_norm_2": (REPLAYED, "elementwise"),
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": (["step"], "optimizer"),
    "Memcpy HtoD (Pinned -> Device)": (["data wait", "aten::copy_"], "elementwise"),
}


def test_every_kernel_has_its_kind():
    """Determined by its operators if there are any; otherwise, as under CUDA graphs, by its name."""
    for name, (operators, kind) in KERNELS.items():
        seconds = breakdown.seconds_by_kind(launched(name, operators), tiny(vocab_size=V), on_gpu=True)
        assert {kind: value for kind, value in seconds.items() if value} == {kind: 0.2}, name


def test_data_is_the_time_that_the_host_waits_and_a_gpu_range_is_not_a_kernel():
    events = [event("data wait", microseconds=50_000), *launched("nvjet_tst", REPLAYED)]
    events.append(event("step", microseconds=10**7, device="CUDA", is_user_annotation=True))
    seconds = breakdown.seconds_by_kind(events, tiny(vocab_size=V), on_gpu=True)
    assert seconds == dict.fromkeys(seconds, 0.0) | {"data": 0.15, "gemm": 0.2}


def two_tensors(*_):
    kept = torch.ones(1_000_000)
    torch.ones(5_000_000)
    assert len(kept) == 1_000_000


def memory_of(config, before_the_update=lambda *_: None):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loop = measurements.Loop(config)
        loop.optimizer.register_step_pre_hook(before_the_update)
        loop.step()
        loop.step()
    return breakdown.memory_by_part(loop, profiler)


def test_the_parts_add_up_and_the_peak_counts_every_allocation_once(dense):
    config = tiny(dataset=str(dense), set_to_none=True)
    memory = memory_of(config, two_tensors)
    held = memory["weights"] + memory["optimizer"]
    assert held + memory["activations"] + memory["rest"] == memory["peak"]
    assert 0 < memory["peak"] - 24_000_000 - held - memory["gradients"] < 20_000  # a batch and a few scalars
    assert memory["activations"] == memory_of(config)["activations"]


def test_activations_grow_with_the_batch_and_the_weights_do_not(dense):
    small, large = (memory_of(tiny(dataset=str(dense), batch_size=size)) for size in (2, 8))
    assert 3.5 < large["activations"] / small["activations"] < 4.1
    for part in ("weights", "gradients", "optimizer"):
        assert small[part] == large[part] > 0


def test_the_figure_is_left_out_if_the_system_does_not_report_resident_memory():
    assert measurements.resident_bytes("VmNothing") is None


def test_an_8_bit_tensor_counts_its_parts():
    optim = pytest.importorskip("torchao.optim")
    layer = torch.nn.Linear(128, 64, bias=False)
    optimizer = optim.AdamW8bit(layer.parameters())
    layer.weight.grad = torch.ones_like(layer.weight)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    mean = optimizer.state[layer.weight]["exp_avg"]
    codes, scales, table = 64 * 128, 4 * 64 * 128 // 256, 4 * 256
    assert sum(part.nbytes for part in breakdown.plain(mean)) == codes + scales + table < mean.nbytes / 3
    assert breakdown.plain(layer.weight) == [layer.weight]


def test_a_run_that_diverges_has_no_validation_loss(dense):
    config = tiny(dataset=str(dense), optimizer="sgd", learning_rate=1e30, grad_clip=0.0, max_steps=9)
    found = measurements.curve(config)
    assert found["val_loss"] is None


def test_products_use_tf32_only_on_a_gpu():
    config = tiny(matmul_precision="high")
    assert breakdown.product_format(config, torch.device("cpu")) == "float32"
    assert breakdown.product_format(config, torch.device("cuda")) == "tf32"
    assert breakdown.product_format(tiny(dtype="bfloat16"), torch.device("cuda")) == "bfloat16"


@pytest.mark.parametrize(("given", "expected"), [(2e-2, 1e-3), (6e-4, 6e-4)])
def test_losses_are_compared_at_learning_rates_that_suit_adamw(given, expected):
    """At the quickstart's 2e-2, which is Muon's, AdamW's loss rises from 7.5 to 8.7, and 8-bit states look WRONG."""
    config = measurements.compared(tiny(learning_rate=given, min_lr=given / 10, max_steps=100))
    rates = [train.learning_rate(step, config) for step in range(1, 101)]
    assert max(rates) == pytest.approx(expected) and rates[-1] == pytest.approx(expected, rel=1e-3)


@needs_gpu
@pytest.mark.usefixtures("fresh_gpu")
@pytest.mark.parametrize("stage", ["naive", "flash", "chunked_loss"])
def test_on_a_gpu_memory_is_the_allocator_s_and_time_the_kernels(dense, stage):
    words = [*flags(device="cuda", batch_size=16, context_length=64, n_embd=128, dataset=dense), f"--stage={stage}"]
    measured = measurements.profile_step(load_config([word for word in words if word.split("=")[0][2:] not in LADDER]))
    memory, seconds = measured["memory"], measured["seconds_by_kind"]
    held = memory["weights"] + memory["gradients"] + memory["optimizer"]
    assert held < memory["peak"] <= memory["reserved"]
    assert 0 < memory["activations"] < memory["peak"]
    assert memory["context"] > 50e6
    assert 0 < sum(seconds.values()) <= measured["profiled_seconds"]
    assert min(seconds["gemm"], seconds["attention"], seconds["optimizer"]) > 0


@needs_gpu
@pytest.mark.parametrize("keys", [{}, {"compile": True}, {"compile": True, "cuda_graph": True}])
def test_on_a_gpu_the_kinds_add_up_to_the_kernels(dense, keys):
    config = tiny(dataset=str(dense), device="cuda", n_embd=128, context_length=64, attention="sdpa", **FAST, **keys)
    loop = measurements.Loop(config)
    for _ in range(measurements.WARMUP):
        loop.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        loop.step()
        torch.cuda.synchronize()
    found = profiler.profiler.kineto_results.events()
    on_device = [e for e in found if e.device_type() == torch.autograd.DeviceType.CUDA and not e.is_user_annotation()]
    replayed = any(event.name() == "cudaGraphLaunch" for event in found)
    assert replayed == ("cuda_graph" in keys)
    seconds = breakdown.seconds_by_kind(profiler.events(), loop.config, on_gpu=True)
    del seconds["data"]
    assert min(seconds.values()) > 0
    assert sum(seconds.values()) == pytest.approx(sum(event.duration_ns() for event in on_device) / 1e9, rel=1e-3)
