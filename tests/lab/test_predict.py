"""Predictions: a step allocates the predicted bytes, and the predicted micro-batch fits."""

import dataclasses
import functools
import gc
import json
import operator
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, build, needs_gpu, replace, state_bytes, tiny
from processes import torchrun, words
from torch.profiler import ProfilerActivity, profile

import train
from lab import predict
from lab.trace import Ledger, cublas_workspaces, traced
from nanoladder.config import load_config, stage_names
from nanoladder.data import Batch
from nanoladder.errors import BadInput
from nanoladder.run.memory import block_activations

# Large enough for tensors to outweigh the scratch memory of kernels, small enough for a step of a tenth of a second.
SMALL = {"n_layer": 3, "n_head": 4, "n_embd": 128, "context_length": 128, "vocab_size": 1000, "batch_size": 8}
SMALL |= {"compile": False, "device": "cpu", "num_workers": 0}
# The head is most of this model.
WIDE = SMALL | {"n_layer": 1, "vocab_size": 9000, "batch_size": 4}


def peaks_of_processes(folder, config, n):
    """The peak of all tensors of each of n processes in a step, by a ledger of real tensors."""
    result = torchrun("tests/lab/peak_worker.py", folder, *words(config), n=n)
    assert result.returncode == 0, result.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("peak*.json"))]


def small(*files, shape=SMALL, **keys):
    config = load_config([*files, *(f"--{key}={value}" for key, value in (shape | keys).items())])
    return replace(config, dtype="bfloat16") if config.dtype == "auto" else config  # even if it is not native


def measured(config):
    """The peak of all tensors in the first two steps, as torch.profiler sees every allocation of the CPU."""
    gc.collect()  # garbage of other tests would be freed in between
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        batch = Batch(*torch.randint(config.vocab_size, (2, config.batch_size, config.context_length)).unbind())
        state = build(config)
        for _ in range(2):
            train.train_step(*state, batch, 1e-3, config)
    now = peak = 0
    for size in without_scratch_of_products(profiler.profiler.kineto_results.events()):
        now += size
        peak = max(peak, now)
    return peak


def without_scratch_of_products(events):
    """Bytes of every allocation, and negative of every release, except what a matrix product allocates and frees.

    Emulated bfloat16 products hold a float32 copy for a moment; the prediction is for native ones.
    """
    events = sorted(events, key=lambda event: event.start_ns())
    sizes, end, first = [], 0, 0
    for event in events:
        if event.name() in ("aten::mm", "aten::addmm"):
            end, first = event.end_ns(), len(sizes)
        elif event.name() == "[memory]":
            size = event.nbytes()
            if event.start_ns() < end and -size in sizes[first:]:
                del sizes[first + sizes[first:].index(-size)]
            else:
                sizes.append(size)
    return sizes


@pytest.mark.parametrize("shape", [SMALL, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("stage", stage_names())
def test_the_peak_of_every_eager_stage_is_predicted(stage, shape):
    config = small(f"--stage={stage}", shape=shape)
    assert predict.predict_memory(config).peak == pytest.approx(measured(config), rel=0.01)


# One block, and a vocabulary from a fraction of the model to nearly all of it.
THIN = SMALL | {"n_layer": 1, "n_head": 2, "n_embd": 64, "context_length": 64, "batch_size": 4}
IN_FLOAT32 = ["chunked_loss", "checkpointing", "grad_accumulation"]  # peaks that bfloat16's copies would hide


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [65, 256, 5003, 30011, 50257])
@pytest.mark.parametrize(
    "stage, dtype", [(stage, None) for stage in stage_names()] + [(s, "float32") for s in IN_FLOAT32]
)
def test_the_peak_of_every_eager_stage_is_predicted_at_every_vocabulary(stage, dtype, vocab_size):
    config = small(f"--stage={stage}", shape=THIN, vocab_size=vocab_size, **({"dtype": dtype} if dtype else {}))
    assert predict.predict_memory(config).peak == pytest.approx(measured(config), rel=0.01)


@pytest.mark.parametrize(
    "keys",
    [
        {"loss_chunks": 0, "vocab_size": 30011, "batch_size": 1, "context_length": 16},
        {"loss_chunks": 1, "vocab_size": 5003},
        {"loss_chunks": 8, "vocab_size": 30011},
    ],
    ids=str,
)
def test_the_peak_of_the_tied_weights_gradient_is_predicted(keys):
    """Autograd writes the sum of its two parts over the first, unless that is a transposed view, as without chunks."""
    config = small(shape=THIN | keys, dtype="float32")
    assert predict.predict_memory(config).peak == pytest.approx(measured(config), rel=0.005)


@pytest.mark.parametrize(
    "keys",
    [
        {"stage": "naive"},
        {"stage": "amp"},
        {"stage": "chunked_loss", "vocab_size": 30011, "loss_chunks": 4},
        {"stage": "checkpointing"},
        {"stage": "grad_accumulation", "micro_batch_size": 2},
        {"optimizer_in_backward": True, "grad_clip": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("freeze", ["embeddings", "blocks:2"])
def test_the_peak_of_a_frozen_model_is_predicted(freeze, keys):
    config = small(shape=SMALL | keys, freeze=freeze)
    predicted, whole = predict.predict_memory(config), predict.predict_memory(replace(config, freeze="none"))
    assert predicted.peak == pytest.approx(measured(config), rel=0.01)
    assert predicted.peak < whole.peak and predicted.weights == whole.weights
    learning = sum(parameter.nbytes for parameter in build(config)[0].parameters() if parameter.requires_grad)
    assert predicted.gradients == learning or config.optimizer_in_backward
    assert predicted.optimizer == pytest.approx(2 * learning, rel=0.01)  # AdamW's moments, and a step for each weight


def assert_compiled_peak_is_predicted(**keys):
    config = small(shape=THIN | {"n_layer": 2, "compile": True} | keys)
    predicted = predict.predict_memory(config)  # leaves nothing compiled that would be measured
    assert predicted.peak == pytest.approx(measured(config), rel=0.01)
    return config, predicted


def test_the_peak_of_compiled_blocks_is_predicted():
    _, predicted = assert_compiled_peak_is_predicted(compile_scope="block", vocab_size=256)
    assert 0 < predicted.block < predicted.activations / 2


@pytest.mark.slow
@pytest.mark.parametrize("freeze", ["embeddings", "blocks:1"])
def test_the_peak_of_a_compiled_frozen_model_is_predicted(freeze):
    assert_compiled_peak_is_predicted(freeze=freeze, vocab_size=256, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "vocab_size, dtype",
    [
        (65, "bfloat16"),
        (256, "bfloat16"),
        (256, "float32"),
        (30011, "bfloat16"),
        (50257, "float32"),
        (50257, "bfloat16"),
    ],
)
def test_the_peak_of_a_compiled_step_is_predicted_at_every_vocabulary(vocab_size, dtype):
    config, predicted = assert_compiled_peak_is_predicted(vocab_size=vocab_size, dtype=dtype, loss_chunks=0)
    assert predicted.peak < predict.predict_memory(replace(config, compile=False)).peak


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"loss_chunks": 3, "vocab_size": 30011},
        {"micro_batch_size": 2, "dtype": "float32"},
        {"checkpointing": "every:1", "vocab_size": 5003},
        {"checkpointing": "selective", "vocab_size": 5003},
        {"checkpointing": "every:1", "compile_scope": "block"},
        {"dropout": 0.1, "bias": True, "attention": "matmul"},
        {"optimizer": "adafactor", "grad_clip": 0, "optimizer_in_backward": True},
        {"optimizer": "adamw8bit", "compile_scope": "block", "n_layer": 1},
    ],
    ids=str,
)
def test_the_peak_of_other_compiled_steps_is_predicted(keys):
    assert_compiled_peak_is_predicted(**{"loss_chunks": 0} | keys)


@pytest.mark.slow
def test_compiled_for_cuda_the_gradient_of_the_logits_has_a_buffer_of_its_own():
    config = small(shape=THIN, compile=True, vocab_size=50257, loss_chunks=0)
    cpu, cuda = (predict.predict_memory(config, device) for device in ("cpu", "cuda"))
    logits = 2 * config.batch_size * config.context_length * 50257
    assert cuda.peak - cublas_workspaces() - cpu.peak == pytest.approx(logits, rel=0.1)


def test_predicting_a_compiled_step_takes_no_cpp_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    traced.clear()
    config = small(shape=THIN, compile=True, compile_scope="block")
    assert predict.predict_memory(config).peak < predict.predict_memory(replace(config, compile=False)).peak


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"dropout": 0.1, "bias": True},
        {"dropout": 0.1, "attention": "matmul", "dtype": "float32"},
        {"attention": "blocks", "context_length": 300},
        {"checkpointing": "sqrt", "n_layer": 4},
        {"checkpointing": "selective"},
        {"checkpointing": "every:2", "n_layer": 4},
        {"adamw_impl": "foreach", "batch_size": 1, "context_length": 16},
        {"adamw_impl": "forloop", "batch_size": 1, "context_length": 16},
        {"dtype": "float16"},
        {"set_to_none": False, "micro_batch_size": 1},
    ],
    ids=str,
)
def test_the_peak_of_settings_outside_the_ladder_is_predicted(keys):
    config = small(**keys)
    assert predict.predict_memory(config).peak == pytest.approx(measured(config), rel=0.01)


OPTIMIZERS = ["sgd", "adafactor", "muon", "lion", "adamw8bit", "galore"]


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", ["adamw", *OPTIMIZERS])
def test_the_peak_and_the_state_of_every_optimizer_are_predicted(name, inside):
    config = small(optimizer=name, grad_clip=0, optimizer_in_backward=inside, batch_size=4)
    predicted = predict.predict_memory(config)
    assert predicted.peak == pytest.approx(measured(config), rel=0.01)
    model, optimizer, scaler = build(config)
    batch = Batch(*torch.randint(config.vocab_size, (2, 4, config.context_length)).unbind())
    train.train_step(model, optimizer, scaler, batch, 1e-3, config)
    assert predicted.optimizer == pytest.approx(state_bytes(optimizer), rel=0.05 if name == "adamw8bit" else 0.01)


def test_updates_in_the_backward_take_less_by_nearly_the_gradients():
    keys = {"batch_size": 1, "context_length": 16, "grad_clip": 0, "n_layer": 12, "dtype": "float32"}
    after, inside = (predict.predict_memory(small(optimizer_in_backward=inside, **keys)) for inside in (False, True))
    assert inside.optimizer == after.optimizer
    assert inside.gradients == 4 * 1024 * 128  # of the embedding alone
    assert after.peak - inside.peak > 0.7 * after.gradients


def test_the_scratch_memory_of_kernels_is_counted(monkeypatch):
    """A CPU casts a part of the head's gradient to float32 to add it."""
    config = small(shape=WIDE, loss_chunks=32)
    monkeypatch.setattr(Ledger, "scratch", lambda *_: 0)
    traced.clear()
    assert predict.predict_memory(config).peak < 0.9 * measured(config)
    traced.clear()


def test_on_cuda_the_backward_of_fused_attention_sums_in_float32():
    aten = torch.ops.aten
    forward, backward = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward
    half, full = (torch.empty(2, 4, 8, 16, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    ledger = Ledger(on_cuda=True)
    assert ledger.scratch(backward.default, [half] * 4) == 2 * 4 * 8 * 16 * 4
    assert ledger.scratch(backward.default, [full] * 4) == ledger.scratch(forward.default, [half] * 3) == 0


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_weights_gradients_and_state_are_exact(device_type):
    config = tiny(vocab_size=64, n_layer=2, n_embd=32, context_length=16)
    memory = predict.predict_memory(config, device_type)
    tensors = [64 * 32, 16 * 32, 32] + 2 * [32, 3 * 32 * 32, 32 * 32, 32, 4 * 32 * 32, 4 * 32 * 32]
    sizes = [4 * size for size in tensors]
    steps, masks = [4] * len(tensors), [16 * 16] * 2
    inputs = 2 * 8 * 4 * 16
    if device_type == "cuda":
        steps, masks = [512] * len(tensors), [512] * 2
        assert all(size % 512 == 0 for size in sizes[:2])
        sizes = [-size // 512 * -512 for size in sizes]
    assert memory.weights == sum(sizes) + sum(masks)
    assert memory.gradients == sum(sizes)
    assert memory.optimizer == 2 * sum(sizes) + sum(steps)
    assert memory.inputs == inputs


def test_the_parts_add_up_if_gradients_stay():
    memory = predict.predict_memory(small(set_to_none=False))
    parts = dataclasses.asdict(memory)
    peak, _ = parts.pop("peak"), parts.pop("block")
    assert peak == pytest.approx(sum(parts.values()), abs=100)  # less the scalars of the loss


def test_fp32_activations_of_a_block_are_counted_by_hand():
    config = small("--stage=set_to_none")
    B, T, C, nh = config.batch_size, config.context_length, config.n_embd, config.n_head
    # The norms' inputs and outputs, q, k, v, y, the output that goes on and 8 of the MLP, and the (T, T) weights.
    kept = B * T * C * (2 + 2 + 3 + 1 + 8) + B * nh * T * T
    statistics = 2 * 2 * B * T
    assert predict.predict_memory(config).block == 4 * (kept + statistics)


def test_every_setting_that_saves_memory_lowers_the_predicted_peak():
    rungs = [{"loss_chunks": 0}, {"loss_chunks": 8}, {"checkpointing": "every:1"}, {"micro_batch_size": 2}]
    keys = [functools.reduce(operator.or_, rungs[: n + 1]) for n in range(len(rungs))]
    peaks = [predict.predict_memory(small(**rung)).peak for rung in keys]
    assert peaks == sorted(set(peaks), reverse=True)


def test_settings_that_change_no_tensor_share_a_trace():
    traced.clear()
    for stage in ("set_to_none", "lazy_metrics", "allocator", "tf32"):
        predict.predict_memory(small(f"--stage={stage}"))
    assert len(traced) == 1


def test_dropping_gradients_saves_nothing_if_micro_batches_accumulate():
    kept, dropped = (predict.predict_memory(small(set_to_none=there, micro_batch_size=2)) for there in (False, True))
    assert kept == dropped


@pytest.mark.parametrize("keys", [{"attention": "sdpa"}, {"attention": "matmul"}, {"dropout": 0.1}], ids=str)
@pytest.mark.parametrize("checkpointing", ["none", "every:1", "selective"])
def test_cuda_is_predicted_without_a_gpu(checkpointing, keys):
    config = small(checkpointing=checkpointing, **keys)
    cpu, cuda = predict.predict_memory(config), predict.predict_memory(config, "cuda")
    assert cuda.weights == pytest.approx(cpu.weights, rel=0.01)
    assert cuda.temporary > cpu.temporary + 2**24  # cuBLAS's workspaces
    assert torch.nn.functional.dropout.__module__ == "torch.nn.functional"  # nothing stays patched


def test_auto_attention_is_predicted_for_the_device():
    auto = small(attention="auto", dtype="bfloat16")
    assert predict.predict_memory(auto) == predict.predict_memory(replace(auto, attention="blocks"))
    assert predict.predict_memory(auto, "cuda") == predict.predict_memory(replace(auto, attention="sdpa"), "cuda")


def test_cuda_keeps_the_tensors_of_its_own_kernels():
    B, T, C, nh = 8, 128, 128, 4
    matmul = small("--stage=amp", attention="matmul")
    # autocast computes softmax in float32 there: the weights are kept in float32 and, for the product, in half.
    assert predict.predict_memory(matmul, "cuda").block - predict.predict_memory(matmul).block == pytest.approx(
        4 * B * nh * T * T, rel=0.01
    )
    mask = predict.predict_memory(small(dropout=0.1), "cuda").block - predict.predict_memory(small(), "cuda").block
    assert mask == pytest.approx(2 * B * T * C, rel=0.01)  # a bool for each output of attention and MLP


def test_shares_of_sharded_state_are_smaller():
    config = small(n_layer=8, dtype="float32")
    whole, optimizer, full = (
        predict.predict_memory(replace(config, batch_size=size, shard=shard), "cpu", world_size)
        for size, shard, world_size in [(2, "none", 1), (8, "optimizer", 4), (8, "full", 4)]
    )
    assert optimizer.optimizer == full.optimizer == pytest.approx(whole.optimizer / 4, rel=0.01)
    assert optimizer.gradients == full.gradients == pytest.approx(whole.gradients / 4, rel=0.01)
    assert optimizer.weights == pytest.approx(1.25 * whole.weights, rel=0.01)  # its shard, and all of them gathered
    outside = 4 * (1024 + 128 + 1) * 128
    assert full.weights == pytest.approx(whole.weights / 4 + outside, rel=0.01)
    assert full.peak < optimizer.peak < whole.peak
    assert full.activations == optimizer.activations == pytest.approx(whole.activations, rel=0.01)


def test_a_process_of_thousands_is_predicted():
    config = small(n_layer=2, batch_size=4096, shard="full", dtype="float32")
    everyone, node = (
        predict.predict_memory(replace(config, shard_within=within), "cuda", 4096) for within in (0, "node")
    )
    assert everyone.optimizer < node.optimizer
    weights = predict.predict_memory(replace(config, batch_size=1), "cuda").weights
    assert node.gradients == pytest.approx(weights / 8, rel=0.05)


def test_on_cuda_the_weights_of_blocks_are_gathered_in_half_precision():
    config = small(shard="optimizer", dtype="bfloat16")
    cpu, cuda = (predict.predict_memory(config, device, 2) for device in ("cpu", "cuda"))
    assert cpu.weights - cuda.weights == pytest.approx(2 * 3 * 12 * 128**2, rel=0.05)


def test_fsdp_keeps_whole_gradients_between_micro_batches():
    config = small(shard="full", dtype="float32", batch_size=4, context_length=16, n_layer=8)
    whole, cut = (predict.predict_memory(replace(config, micro_batch_size=size), "cpu", 2) for size in (2, 1))
    assert cut.temporary > whole.temporary + whole.gradients / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"shard": "optimizer"},
        {"shard": "full"},
        {"shard": "full", "micro_batch_size": 1},
        {"shard": "full", "n_layer": 8, "context_length": 16},  # the optimizer tries whole weights
        {"tensor_parallel": 2},
        {"context_parallel": 2},
    ],
    ids=str,
)
def test_the_bytes_of_two_processes_are_predicted(tmp_path, keys):
    config = small(dtype="float32", **keys)
    for peak in peaks_of_processes(tmp_path, config, 2):
        assert predict.predict_memory(config, world_size=2).peak == pytest.approx(peak, abs=2000)


TWICE = """
from conftest import tiny
from lab.predict import predict_memory
keys = {"n_embd": 64, "context_length": 64, "batch_size": 2, "vocab_size": 257, "tensor_parallel": 2}
print(*(predict_memory(tiny(ddp=True, seed=seed, **keys), world_size=2).peak for seed in (1, 2)))
"""


def test_the_first_prediction_of_a_process_is_like_its_second():
    """DTensor tries each operator once, on whole tensors."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    result = subprocess.run([sys.executable, "-c", TWICE], env=environment, capture_output=True, text=True, check=True)
    first, second = result.stdout.split()
    assert first == second


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"micro_batch_size": 2, "batch_size": 10, "pipeline_schedule": "interleaved"}, "a multiple of 2 micro-"),
        ({"micro_batch_size": 1, "n_layer": 1}, "n_layer=1"),
        ({"micro_batch_size": 0}, "makes 1"),
    ],
)
def test_a_pipeline_that_cannot_train_is_not_predicted(keys, message):
    with pytest.raises(BadInput, match=message):
        predict.predict_memory(small(dtype="float32", **{"n_layer": 4, "pipeline_parallel": 2, **keys}), world_size=2)


def test_the_largest_micro_batch_fills_the_pipeline():
    config = small(dtype="float32", pipeline_parallel=2, n_layer=4, batch_size=12, pipeline_schedule="interleaved")
    assert predict.largest_micro_batch(config, 1e12, world_size=2) == 6


@pytest.mark.slow
def test_the_bytes_of_a_pipeline_are_predicted(tmp_path):
    config = small(dtype="float32", pipeline_parallel=2, micro_batch_size=2, n_layer=4)
    peak = max(peaks_of_processes(tmp_path, config, 2))
    assert predict.predict_memory(config, world_size=2).peak == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize(
    "arguments, message",
    [(["mps"], "device=mps"), (["cpu", 3], "does not divide among 3 processes")],
)
def test_configs_that_cannot_be_predicted_are_refused(arguments, message):
    with pytest.raises(BadInput, match=message):
        predict.predict_memory(small(), *arguments)
    with pytest.raises(BadInput, match="vocab_size"):
        predict.predict_memory(small(vocab_size=0))


def test_predicting_leaves_the_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    traced.clear()
    predict.predict_memory(small(dropout=0.1))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["naive", "flash", "checkpointing"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_largest_micro_batch_fits_and_the_next_does_not(stage, device_type):
    config = small(f"--stage={stage}", batch_size=24, n_layer=2)
    sizes = [1, 2, 3, 4, 6, 8, 12, 24]
    peaks = [predict.predict_memory(replace(config, micro_batch_size=size), device_type).peak for size in sizes]
    for size, peak, following in zip(sizes, peaks, [*sizes[1:], 24], strict=True):
        assert predict.largest_micro_batch(config, peak, device_type) == (size if peak < peaks[-1] else following)
        assert predict.largest_micro_batch(config, peak - 1, device_type) < size
    assert predict.largest_micro_batch(config, 10 * peaks[-1], device_type) == 24
    assert predict.largest_micro_batch(config, 1000, device_type) == 0


def test_the_largest_micro_batch_is_found_in_few_predictions():
    config = small(batch_size=480, loss_chunks=0)
    traced.clear()
    assert predict.largest_micro_batch(config, 100e6) in range(2, 480)
    assert len(traced) <= 6  # of 24 divisors


def test_the_largest_micro_batch_is_of_one_process():
    config = small(batch_size=24)
    assert predict.largest_micro_batch(config, 1e12, world_size=3) == 8


@pytest.mark.parametrize("stage", ["naive", "set_to_none"])
def test_activations_of_a_block_follow_the_formula_in_float32_without_dropout(stage):
    config = small(f"--stage={stage}")
    assert predict.predict_memory(config).block == pytest.approx(block_activations(config), rel=0.01)


def test_costs_are_those_of_the_whole_run():
    config = small("config/gpt2.py", shape={}, vocab_size=50257, max_steps=1000)
    costs = predict.costs(config, mfu=0.5, peak_flops=1e15, world_size=4)
    blocks = 12 * (12 * 768**2 + 2 * 768)
    assert costs["n_params"] == (50257 + 1024 + 1) * 768 + blocks
    assert costs["flops_per_token"] == 6 * (costs["n_params"] - 1024 * 768) + 12 * 12 * 768 * 1024
    assert costs["tokens"] == 1000 * 480 * 1024
    assert costs["pf_days"] * 86400e15 == pytest.approx(costs["tokens"] * costs["flops_per_token"])
    assert costs["hours"] == pytest.approx(costs["pf_days"] * 24 / (0.5 * 4))


def test_the_header_has_the_cost_of_the_run():
    config = small(max_steps=1000)
    hours = predict.costs(config, 0.5, 1e9, 2)["hours"]
    header = predict.header(config, "cuda", 0.5, 1e9, 2, price=100)
    assert header.startswith("0.7 M parameters, ") and " in each of 2 processes" in header
    assert f"{hours:.3g} hours at 50% of 2 × 0.001 TFLOP/s, {200 * hours:,.2f} at 100 an hour" in header


def test_the_report_has_a_row_for_every_stage():
    rows = [(stage, small(f"--stage={stage}")) for stage in ("naive", "flash")]
    lines = predict.report(rows[-1][1], rows, memory_gb=0.1).splitlines()
    header, naive, flash = lines[-3:]
    assert header.endswith("fits 0.1 GB  longest context")
    assert naive.split()[1:4] == ["0.003", "0.003", "0.006"]  # bytes: 4 a parameter, 4, and 8
    assert float(flash.split()[6]) == round(predict.predict_memory(rows[1][1]).peak / 1e9, 3)
    longest = f"{predict.longest_context(rows[1][1], 1e8):,}"
    assert flash.split()[-4:] == [str(predict.largest_micro_batch(rows[1][1], 1e8)), "of", "8", longest]
    assert "fits" not in predict.report(rows[0][1], rows)


def test_the_longest_context_fits_and_the_next_does_not():
    config = small("--stage=flash", n_layer=1, vocab_size=64, micro_batch_size=1)
    peaks = {n: predict.predict_memory(replace(config, context_length=n)).peak for n in (64, 128, 2048, 3072)}
    assert predict.longest_context(config, peaks[128] - 1) == 64
    assert predict.longest_context(config, peaks[3072] - 1) == 2048
    assert predict.longest_context(config, peaks[3072]) == 3072
    assert predict.longest_context(config, 1000) == 0


def test_a_row_that_the_processes_cannot_train_has_the_reason():
    rows = [(f"cut by {n}", small(tensor_parallel=n, batch_size=6)) for n in (1, 2)]
    *_, row, reason = predict.report(rows[0][1], [*rows, ("wrong", BadInput("no"))], world_size=3).splitlines()[:-1]
    assert row.startswith("cut by 1 ") and reason.startswith("cut by 2: tensor_parallel=2 does not divide 3")


def test_the_report_says_how_a_compiled_stage_is_predicted():
    rows = [("compile", small("--stage=compile", compile=True, n_layer=1))]
    *_, compiled = predict.report(rows[0][1], rows).splitlines()
    assert compiled.split()[0] == "compile" and compiled.split()[-2] == "-"  # no block on its own
    *_, compiled, note = predict.report(rows[0][1], rows, "cuda").splitlines()
    assert compiled.split()[0] == "compile*" and note.startswith("* compiled as for a CPU")


@needs_gpu
@pytest.mark.parametrize("stage", stage_names())
def test_on_a_gpu_the_peak_of_every_eager_stage_is_predicted(stage):
    """With 16 M parameters, the few MB that only a GPU's kernels take do not matter."""
    keys = {"n_layer": 4, "n_head": 8, "n_embd": 512, "context_length": 512, "vocab_size": 8000, "batch_size": 16}
    config = small(f"--stage={stage}", **keys, device="cuda")
    device = train.set_up(config)
    torch._C._cuda_clearCublasWorkspaces()  # of the test before
    before = torch.cuda.memory_allocated()
    state = build(config, device)
    shape = 2, config.batch_size, config.context_length
    batch = Batch(*torch.randint(config.vocab_size, shape, device=device).unbind())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        train.train_step(*state, batch, 1e-3, config)
    allocated = torch.cuda.max_memory_allocated() - before
    assert predict.predict_memory(config, "cuda").peak == pytest.approx(allocated, rel=0.05)


def test_the_preset_of_least_memory_stays_below_a_gigabyte_and_a_half():
    preset, naive = (load_config(["config/gpt2_low_memory.py", *more]) for more in ([], ["--stage=naive"]))
    assert predict.predict_memory(preset, "cuda").peak < 1.5e9 < predict.predict_memory(naive, "cuda").peak / 5
