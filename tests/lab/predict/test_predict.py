"""Predictions: a step allocates the predicted bytes, and the predicted micro-batch fits."""

import gc
import itertools
import statistics

import pytest
import torch
from conftest import ROOT, build, needs_gpu, replace, state_bytes, tiny, with_torchao
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

import train
from lab.measure import tables
from lab.measure.launch import run_together
from lab.measure.results import read_results
from lab.predict import devices, patches, predict
from lab.predict.trace import Ledger, trace
from nanoladder import parallel
from nanoladder.arithmetic import count_parameters
from nanoladder.config import stage_names
from nanoladder.data import Batch
from nanoladder.errors import BadInput
from nanoladder.run import load_config
from operators import attention

SMALL = {"n_layer": 3, "n_head": 4, "n_embd": 128, "context_length": 128, "vocab_size": 1000, "batch_size": 8}
SMALL |= {"compile": False, "device": "cpu", "num_workers": 0}
# One block, and a vocabulary from a fraction of the model (65) to nearly all of it (50257).
THIN = SMALL | {"n_layer": 1, "n_head": 2, "n_embd": 64, "context_length": 64, "batch_size": 4}
SHORT = {"batch_size": 1, "context_length": 16}
INSIDE = {"optimizer_in_backward": True, "grad_clip": 0}


def small(*files, shape=SMALL, **keys):
    config = load_config([*files, *(f"--{key}={value}" for key, value in (shape | keys).items())])
    return replace(config, dtype="bfloat16") if config.dtype == "auto" else config  # even if it is not native


def measured(config):
    """Bytes of all tensors at the peak of the first two steps, of the gradients, and of the optimizer's state.

    From torch.profiler, which sees every allocation of the CPU.
    """
    gc.collect()  # garbage of other tests would be freed in between
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        batch = Batch(*torch.randint(config.vocab_size, (2, config.batch_size, config.context_length)).unbind())
        model, optimizer, scaler = build(config)
        for _ in range(2):
            train.train_step(model, optimizer, scaler, batch, 1e-3, config)
    now = peak = 0
    for size in without_scratch_of_products(profiler.profiler.kineto_results.events()):
        now += size
        peak = max(peak, now)
    return peak, sum(p.nbytes for p in model.parameters() if p.requires_grad), state_bytes(optimizer)


PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def without_scratch_of_products(events):
    """Bytes of every allocation, and negative of every release, except what a matrix product allocates and frees.

    For a moment, emulated bfloat16 products hold a float32 copy, and batches of native ones up to 50 kB of scratch.
    The prediction counts neither.
    """
    events = sorted(events, key=lambda event: event.start_ns())
    sizes, end, first = [], 0, 0
    for event in events:
        if event.name() in PRODUCTS:
            end, first = event.end_ns(), len(sizes)
        elif event.name() == "[memory]":
            size = event.nbytes()
            if event.start_ns() < end and -size in sizes[first:]:
                del sizes[first + sizes[first:].index(-size)]
            else:
                sizes.append(size)
    return sizes


# Each setting that memory depends on, and pairs of which one changes the memory of the other. float32, whose peaks are
# elsewhere than those of bfloat16 copies; each optimizer, with its update after or inside the backward.
STEPS = [
    {"stage": "naive", "vocab_size": 65},
    {"stage": "tf32", "vocab_size": 50257},
    {"stage": "flash", "vocab_size": 3011},
    {"stage": "chunked_loss", "compile": False, "vocab_size": 256},
    {"stage": "checkpointing", "compile": False, "vocab_size": 65},
    {"stage": "low_memory_optimizer", "compile": False, "n_layer": 2},
    # Autograd writes the sum of the tied weight's two gradients over the first, unless that is a transposed view.
    {"dtype": "float32", "loss_chunks": 0, "vocab_size": 30011, **SHORT},
    {
        "dtype": "float32",
        "loss_chunks": 8,
        "vocab_size": 50257,
        "activation_checkpointing": "every:1",
        "optimizer": "lion",
    },
    {"dtype": "float32", "micro_batch_size": 2, "vocab_size": 256, "optimizer": "sgd"},
    {"dtype": "float32", "attention": "matmul", "dropout": 0.1, "n_layer": 2, "micro_batch_size": 1},
    {"dtype": "float16", "vocab_size": 65, "optimizer": "muon"},
    {"dropout": 0.1, "bias": True, "n_layer": 3, "activation_checkpointing": "selective"},
    {"attention": "blocks", "context_length": 300, "optimizer": "muon", **INSIDE},
    {
        "attention": "blocks",
        "context_length": 300,
        "activation_checkpointing": "sqrt",
        "n_layer": 4,
        "set_to_none": False,
    },
    {"attention": "matmul", "activation_checkpointing": "every:2", "n_layer": 4, "optimizer": "lion", **INSIDE},
    {"set_to_none": False, "micro_batch_size": 1, "vocab_size": 3011, "loss_chunks": 4, "adamw_impl": "forloop"},
    {"adamw_impl": "forloop", **SHORT, **INSIDE},
    {"optimizer": "adafactor", "loss_chunks": 0, "n_layer": 3, **INSIDE},
    {"optimizer": "galore", "n_embd": 128},
]


@pytest.mark.slow
@pytest.mark.parametrize("keys", STEPS, ids=str)
def test_the_memory_of_an_eager_step_is_predicted(keys):
    config = small(shape=THIN | keys)
    predicted = predict.predict_memory(config)
    peak, gradients, state = measured(config)
    assert predicted.peak == pytest.approx(peak, rel=0.01)
    assert predicted.gradients == pytest.approx(gradients, abs=100) or config.optimizer_in_backward
    assert predicted.optimizer == pytest.approx(state, rel=0.05 if config.optimizer == "adamw8bit" else 0.01)


@pytest.mark.parametrize("B, nh, T, dtype", [(1, 2, 64, torch.bfloat16), (3, 12, 512, torch.float32)])
def test_the_temporary_memory_of_attention_in_blocks_is_predicted(B, nh, T, dtype):
    """For all heads at once or some at a time, in the model's layout, from which each head is copied."""

    def attend():
        q, k, v = torch.empty(3, B, T, nh, 32, dtype=dtype, requires_grad=True).transpose(2, 3)
        attention.attend_in_blocks(q, k, v).backward(torch.empty(B, T, nh, 32, dtype=dtype).transpose(1, 2))

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        attend()
    peak = max(itertools.accumulate(without_scratch_of_products(profiler.profiler.kineto_results.events())))
    with FakeTensorMode(), Ledger(on_cuda=False) as ledger:
        attend()
    assert ledger.peak == pytest.approx(peak, abs=1000)


LONG = pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"dtype": "float32", "vocab_size": 50257, "loss_chunks": 0},
        {"activation_checkpointing": "every:1", "shard": "full", "n_layer": 2, "micro_batch_size": 2},
        {"optimizer": "adafactor", "vocab_size": 256, "loss_chunks": 2, "n_layer": 2, **INSIDE},
        pytest.param({"loss_chunks": 3, "vocab_size": 3011, "micro_batch_size": 2}, marks=LONG),
        pytest.param({"loss_chunks": 0, "vocab_size": 256, "n_layer": 2, "batch_size": 8}, marks=LONG),
        pytest.param(
            {"dropout": 0.1, "bias": True, "attention": "matmul", "activation_checkpointing": "selective"}, marks=LONG
        ),
        pytest.param({"optimizer": "adamw8bit", "loss_chunks": 0}, marks=LONG),  # its update is compiled shape by shape
    ],
    ids=str,
)
def test_the_memory_of_a_compiled_step_is_predicted(keys):
    config = small(shape=THIN | {"compile": True} | keys)
    predicted = predict.predict_memory(config)  # leaves nothing compiled that would be measured
    assert predicted.peak == pytest.approx(measured(config)[0], rel=0.01)
    assert predicted.peak <= predict.predict_memory(replace(config, compile=False)).peak


@pytest.mark.slow
def test_a_compiled_step_keeps_half_of_the_residual_stream():
    L, B, T, C = 2, 4, 64, 64
    keys = {"compile": True, "dtype": "bfloat16", "n_layer": L}
    configs = [small(shape=THIN | keys, half_residual=half) for half in (False, True)]
    whole, half = (predict.predict_memory(config, "cuda").activations for config in configs)
    assert whole - half == pytest.approx(2 * (2 * L + 1) * B * T * C, rel=0.1)


@pytest.mark.slow
def test_predicting_a_compiled_step_takes_no_cpp_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    trace.cache_clear()
    config = small(shape=THIN, compile=True, shard="full")  # one block for all
    assert predict.predict_memory(config).peak < predict.predict_memory(replace(config, compile=False)).peak


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


def test_cuda_keeps_the_tensors_of_its_own_kernels():
    B, T, C, nh = 8, 128, 128, 4
    matmul = small("--stage=amp", attention="matmul")
    assert predict.predict_memory(matmul, "cuda").temporary > 2**25  # cuBLAS's workspaces
    # autocast computes softmax in float32 there: the weights are kept in float32 and, for the product, in half.
    cuda, cpu = (predict.predict_memory(matmul, device).activations for device in ("cuda", "cpu"))
    assert cuda - cpu == pytest.approx(3 * 4 * B * nh * T * T, rel=0.02)  # of three blocks
    dropped, plain = (predict.predict_memory(small(dropout=p), "cuda").activations for p in (0.1, 0.0))
    assert dropped - plain == pytest.approx((2 * 3 + 1) * B * T * C, rel=0.02)  # a bool for each number dropped from


def test_on_cuda_the_weights_of_blocks_are_gathered_in_half_precision():
    config = small(shard="optimizer", dtype="bfloat16")
    cpu, cuda = (predict.predict_memory(config, device, 2) for device in ("cpu", "cuda"))
    assert cpu.weights - cuda.weights == pytest.approx(2 * 3 * 12 * 128**2, rel=0.05)


@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_whole_gradients_wait_for_the_last_micro_batch_unless_the_weights_are_sharded(shard):
    shape = {"n_layer": 6, "n_embd": 128, "vocab_size": 64, "micro_batch_size": 1, "set_to_none": True}
    several, one = (tiny(**shape, batch_size=rows, shard=shard, ddp=True) for rows in (4, 2))
    waiting = predict.predict_memory(several, world_size=2).peak - predict.predict_memory(one, world_size=2).peak
    whole = 4 * count_parameters(several)
    assert waiting > 0.6 * whole if shard == "optimizer" else waiting < 0.4 * whole


def peaks_of(configs):
    """The peak bytes of this process's tensors in a step of each config.

    The minimum over several steps, as the thread of a collective sometimes frees its tensors just after the wait.
    """
    found = []
    for config in configs:
        device, sizes, ledger, peaks = train.set_up(config), parallel.mesh().sizes, Ledger(on_cuda=False), []
        shape = 2, config.batch_size // sizes.data, config.context_length // sizes.context
        with patches.counting_resizes(ledger), ledger:
            state = build(config, device)
            batch = Batch(*torch.randint(config.vocab_size, shape).unbind())
            for _ in range(6):
                ledger.peak = 0
                train.train_step(*state, batch, 1e-3, config)
                peaks.append(ledger.peak)
        del state, batch
        found.append(min(peaks[1:]))
    return found


@pytest.mark.slow
def test_the_bytes_of_two_processes_are_predicted(tmp_path):
    rows = [
        {},
        {"shard": "optimizer"},
        {"shard": "full"},
        {"shard": "full", "micro_batch_size": 1},
        {"shard": "full", "n_layer": 8, "context_length": 16},  # the optimizer tries whole weights
        {"tensor_parallel": 2},
        {"context_parallel": 2},
        {"pipeline_parallel": 2, "micro_batch_size": 2, "n_layer": 4},
    ]
    configs = [small(dtype="float32", **{"n_layer": 2} | row) for row in rows]
    peaks = run_together(peaks_of, configs, n=2, folder=tmp_path, seconds=300)
    for config, *found in zip(configs, *peaks, strict=True):
        tolerance = {"rel": 0.02} if config.pipeline_parallel > 1 else {"abs": 2000}
        assert predict.predict_memory(config, world_size=2).peak == pytest.approx(max(found), **tolerance), config


def test_configs_that_cannot_be_predicted_are_refused():
    pipeline = small(dtype="float32", n_layer=1, pipeline_parallel=2, micro_batch_size=1)
    for arguments, message in [
        ((small(), "cpu", 3), "does not divide among 3 processes"),
        ((pipeline, "cpu", 2), "n_layer=1"),
    ]:
        with pytest.raises(BadInput, match=message):
            predict.predict_memory(*arguments)


@pytest.mark.parametrize("stage, device_type", [("naive", "cpu"), ("checkpointing", "cuda")])
def test_the_largest_micro_batch_fits_and_the_next_does_not(stage, device_type):
    config, sizes = small(f"--stage={stage}", shape=THIN, batch_size=12), [1, 2, 3, 4, 6, 12]
    peaks = [predict.predict_memory(replace(config, micro_batch_size=size), device_type).peak for size in sizes]
    for size, peak in zip(sizes, peaks, strict=True):
        assert predict.largest_micro_batch(config, peak, device_type) == size
        assert predict.largest_micro_batch(config, peak - 1, device_type) < size
    assert predict.largest_micro_batch(config, 1000, device_type) == 0


def test_costs_are_those_of_the_whole_run():
    config = small("config/gpt2.py", shape={}, vocab_size=50257, max_steps=1000)
    costs = predict.costs(config)
    blocks = 12 * (12 * 768**2 + 2 * 768)
    assert costs["n_params"] == (50257 + 1024 + 1) * 768 + blocks
    assert costs["flops_per_token"] == 854_438_400
    assert costs["tokens"] == 1000 * 480 * 1024
    assert costs["flops"] == costs["tokens"] * costs["flops_per_token"]


H100 = devices.datasheet("H100")


def test_a_row_has_the_memory_and_the_time_of_a_config():
    config = small("--stage=flash", n_layer=1, dtype="float32")
    row = predict.predict_row("flash", config, H100, memory_gb=0.02)
    assert row["peak"] == predict.predict_memory(config).peak
    assert row["seconds"] == predict.predict_time(config, H100).seconds and row["note"] is None
    assert row["fits"] == predict.largest_micro_batch(config, 2e7) in (1, 2, 4)
    cells = {
        heading: text(row) for heading, text in tables.memory_columns().items() if heading in ("weights", "optimizer")
    }
    assert cells == {"weights": "0.001 (4)", "optimizer": "0.003 (8)"}
    assert predict.predict_row("b", BadInput("no"), H100)["note"] == "no"
    assert "depends on the data" in predict.predict_row("s", replace(config, sampled_softmax=9), H100)["note"]
    in_float16 = predict.predict_row("c", replace(config, dtype="auto", **INSIDE), devices.datasheet("T4"), "cuda")
    assert in_float16["note"].startswith("optimizer_in_backward=True")


ON_AN_H200 = [(50257, stage) for stage in ("naive", "amp", "flash", "cuda_graph", "grad_accumulation")]
ON_AN_H200 += [(256, "naive")]
ON_AN_H200 += [pytest.param(*row, marks=LONG) for row in ((50257, "compile"), (256, "cuda_graph"))]  # as cuda_graph


@pytest.mark.slow
@pytest.mark.parametrize("n_ids, stage", ON_AN_H200)
def test_the_measured_peaks_of_an_h200_are_predicted(n_ids, stage):
    """torch.cuda.max_memory_allocated of config/reference.py, with torch 2.11."""
    results = read_results(ROOT / f"results/nvidia-h200/reference-{n_ids}/runs.jsonl")
    (measured,) = results["modes"]["ladder"]["rows"][stage]["profile"]
    config = load_config(["config/reference.py", f"--stage={stage}", f"--vocab_size={n_ids}"])
    assert predict.predict_memory(config, "cuda").peak == pytest.approx(measured["memory"]["peak"], rel=0.001)


def test_no_stage_on_the_h200_was_faster_than_its_least_time():
    """Its launches are those of a CUDA graph, if it has one; the host needs five times as long."""
    results = read_results(ROOT / "results/nvidia-h200/reference-50257/runs.jsonl")
    rows = results["modes"]["ladder"]["rows"]
    bounds = {name: row["predicted"][0].get("bounds") for name, row in rows.items() if "predicted" in row}
    limits = {name: sum(each.values()) for name, each in bounds.items() if each}
    assert len(limits) > 15
    for name, limit in limits.items():
        assert limit < statistics.median(process["seconds"] for process in rows[name]["time"]), name
    config = load_config(["config/reference.py", "--vocab_size=256", "--n_layer=1", "--batch_size=1"])
    eager = replace(config, cuda_graph=False)
    recorded, started = (
        predict.predict_time(each, devices.datasheet("H200"), "cuda").bounds["launches"] for each in (config, eager)
    )
    assert recorded < started / 3


@needs_gpu
@pytest.mark.usefixtures("fresh_gpu")
@pytest.mark.parametrize("stage", with_torchao(stage_names()))
def test_on_a_gpu_the_peak_of_every_eager_stage_is_predicted(stage):
    """With 16 M parameters, the few MB that only a GPU's kernels take do not matter."""
    keys = {"n_layer": 4, "n_head": 8, "n_embd": 512, "context_length": 512, "vocab_size": 8000, "batch_size": 16}
    config = small(f"--stage={stage}", **keys, device="cuda")
    device = train.set_up(config)
    before = torch.cuda.memory_allocated()
    state = build(config, device)
    shape = 2, config.batch_size, config.context_length
    batch = Batch(*torch.randint(config.vocab_size, shape, device=device).unbind())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        train.train_step(*state, batch, 1e-3, config)
    allocated = torch.cuda.max_memory_allocated() - before
    assert predict.predict_memory(config, "cuda").peak == pytest.approx(allocated, rel=0.05)


@pytest.mark.slow
def test_the_preset_of_least_memory_stays_below_a_gigabyte_and_a_half():
    preset, naive = (load_config(["config/gpt2_low_memory.py", *more]) for more in ([], ["--stage=naive"]))
    assert predict.predict_memory(preset, "cuda").peak < 1.5e9 < predict.predict_memory(naive, "cuda").peak / 5
