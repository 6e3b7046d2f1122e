"""Devices: the right one is chosen; what it lacks is reported, or refused in one line."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, flags, rows, tiny
from torch.utils._filelock import FileLock
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sample
import train
from nanoladder import checkpoint, machine, optim, parallel
from nanoladder.errors import BadInput
from nanoladder.machine import memory, precision
from nanoladder.run import header

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


# -- choosing one


@pytest.mark.parametrize("found, chosen", [("mps", MPS), ("xpu", CPU), (None, CPU), ("cuda", torch.device("cuda", 0))])
def test_auto_is_the_gpu_that_pytorch_finds_and_the_loop_supports(found, chosen, monkeypatch):
    accelerator = found and torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: accelerator)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: found == "mps")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(found == "cuda"))
    assert machine.choose_device("auto") == chosen


@pytest.mark.parametrize(
    "name, expected",
    [
        ("gpu", "expected auto, cpu, cuda, cuda:N or mps"),
        ("meta", "expected auto, cpu, cuda, cuda:N or mps"),
        ("mps:1", "expected auto, cpu, cuda, cuda:N or mps"),
        ("mps", "has 0 MPS devices"),
        ("cuda:7", "has 0 CUDA devices"),
    ],
)
def test_a_missing_or_unknown_device_is_bad_input(name, expected, dense, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    line = refused(train.main, *flags(device=name, dataset=dense, out_dir=tmp_path / "run"))
    assert f"device={name}" in line and expected in line
    assert not (tmp_path / "run").exists()


# -- mps, which no test machine has: CPU tensors, with PyTorch's functions patched


class NoFloat64(TorchDispatchMode):
    """Fails if an operation returns float64."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            assert not (isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64), f"float64 from {function}"
        return result


def test_nothing_needs_float64_on_a_device_that_has_none(dense, tmp_path, run_main, monkeypatch):
    monkeypatch.setattr(precision, "WITHOUT_FLOAT64", ("cpu",))
    words = flags(dataset=dense, out_dir=tmp_path / "run", optimizer="muon", eval_interval=3, lazy_metrics=True)
    with NoFloat64():
        assert run_main(train.main, *words, "--adamw_impl=fused").code == 0
        assert run_main(sample.main, f"--out_dir={tmp_path / 'run'}", "--device=cpu", "--max_new_tokens=3").code == 0
    assert machine.double(torch.ones(1)).dtype == torch.float32


def test_mps_chooses_float32_and_its_own_attention():
    assert machine.choose_dtype("auto", MPS) == torch.float32
    assert machine.choose_dtype("bfloat16", MPS) == torch.bfloat16
    assert "(T, T) matrix" in machine.attention_kernel(tiny(attention="sdpa"), MPS)
    with pytest.raises(BadInput, match="attention=flash has no kernel on mps"):
        machine.check(tiny(attention="flash"), MPS)


def test_mps_does_not_recompute_dropout():
    """PyTorch would draw other numbers, because torch.mps lacks the attribute that it looks for."""
    assert not hasattr(torch.mps, "_initialized")  # if it gets one, or this fails otherwise, look again
    line = "activation_checkpointing=every:1 with dropout=0.1: on mps .* expected --activation_checkpointing=none or"
    with pytest.raises(BadInput, match=line):
        machine.check(tiny(activation_checkpointing="every:1", dropout=0.1), MPS)
    machine.check(tiny(activation_checkpointing="every:1"), MPS)
    machine.check(tiny(dropout=0.1), MPS)


def test_an_update_in_the_backward_cannot_undo_the_scale_of_float16(monkeypatch):
    monkeypatch.setattr("nanoladder.machine.device.choose_dtype", lambda *_: torch.float16)
    config = tiny(optimizer_in_backward=True, grad_clip=0.0, dtype="auto", attention="matmul")
    with pytest.raises(BadInput, match=r"optimizer_in_backward=True, dtype=float16: .* expected --dtype=float32"):
        machine.check(config, CPU)


def test_the_generator_of_mps_is_saved_and_restored(monkeypatch):
    state, restored = torch.arange(44, dtype=torch.uint8), []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: state)
    monkeypatch.setattr(torch.mps, "set_rng_state", restored.append)
    states = checkpoint.generator_states(MPS)
    assert set(states) == {"cpu", "mps"}
    checkpoint.set_generator_states(states, CPU)  # another device's state stays unused
    assert not restored
    checkpoint.set_generator_states(states, MPS)
    assert torch.equal(restored[0], state)
    checkpoint.set_generator_states({"cpu": states["cpu"]}, MPS)  # of a run on a CPU
    assert len(restored) == 1


@pytest.mark.parametrize("number, may", [(1.0, True), (float("inf"), False), (float("nan"), False)])
def test_on_mps_the_host_checks_for_non_finite_values_before_an_update(number, may, monkeypatch):
    """PyTorch's fused kernel applies the update whatever found_inf says."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], fused=True)
    monkeypatch.setattr(torch, "isfinite", lambda number: torch.tensor(number.value < float("inf")))
    fake = SimpleNamespace(device=MPS, value=number)
    assert optim.check_finite(optimizer, fake) is may


def test_several_processes_on_mps_are_bad_input(monkeypatch):
    for name in parallel.LAUNCHED:
        monkeypatch.setenv(name, "2")
    with pytest.raises(BadInput, match="2 processes on mps, which is one GPU"):
        parallel.init_process_group(tiny(ddp=True), MPS)


# -- CUDA before Ampere, emulated by patches


@pytest.fixture
def gpu(monkeypatch):
    """gpu(name, capability) lets PyTorch describe such a GPU."""

    def describe(name, capability):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (15e9, 16e9))
        native = capability >= (8, 0)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native)

    return describe


def test_a_gpu_before_ampere_uses_float16(gpu):
    gpu("Tesla T4", (7, 5))
    chosen = header.choices(tiny(vocab_size=17, dtype="auto"), CUDA, "math kernel")
    assert chosen["device"] == "Tesla T4, 15.0 GB free; float16 (bfloat16 is not native here)"
    asked = header.choices(tiny(vocab_size=17, dtype="bfloat16"), CUDA, "")["device"]
    assert asked.endswith("; bfloat16 (as requested, but emulated here, and slow: expected --dtype=float16)")


@pytest.mark.slow
@pytest.mark.skipif(not precision.multiplies_bfloat16(), reason="needs bfloat16, to be forbidden")
def test_a_cpu_chooses_float32_if_onednn_may_not_use_bfloat16():
    code = "import torch; from nanoladder import machine; print(machine.choose_dtype('auto', torch.device('cpu')))"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["torch.float32"]


# -- free memory


LIMITS = [("max", 1, 8e9, 18e9), ("5000000000", 1, 4e9, 7e9), ("5000000000", 2, 2e9, 3.5e9)]


@pytest.mark.parametrize("most, n_processes, free, total", LIMITS)
def test_memory_is_what_a_container_and_other_processes_leave(most, n_processes, free, total, monkeypatch):
    meminfo = "MemTotal: 15625000 kB\nMemFree: 5 kB\nMemAvailable: 7812500 kB\nSwapTotal: 1953125 kB\n"
    texts = {"/proc/meminfo": meminfo, "/sys/fs/cgroup/memory.max": f"{most}\n"}
    texts["/sys/fs/cgroup/memory.stat"] = "anon 1000000000\nfile 7\n"
    monkeypatch.setattr(memory, "Path", lambda path: SimpleNamespace(read_text=lambda: texts[path]))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(n_processes))
    assert (memory.free_memory(CPU), memory.total_memory(CPU)) == (free, total)


# -- the compiler's cache


def test_libraries_that_a_killed_linker_left_are_deleted_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    contents = {"whole": b"\x7fELF", "empty": b"", "headless": bytes(99), "compiling": b""}
    for name, content in contents.items():
        (tmp_path / name[:2]).mkdir()
        (tmp_path / name[:2] / f"{name}.main.so").write_bytes(content)
    with FileLock(tmp_path / "locks" / "compiling.lock"):  # as the compiler does in another process
        machine.keep_cache_sound()
    assert {path.name.partition(".")[0] for path in tmp_path.glob("*/*.so")} == {"whole", "compiling"}
    machine.keep_cache_sound()
    assert [path.name for path in tmp_path.glob("*/*.so")] == ["whole.main.so"]
    assert torch.compiler.config.cache_key_tag == torch.backends.cpu.get_cpu_capability()


# -- peaks


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA GeForce RTX 3060", 25.5),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("AMD Instinct MI300X VF", 1307.4),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", None),
        ("NVIDIA A10-8Q", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
    ],
)
def test_a_peak_is_that_of_the_exact_device(name, tflops, gpu):
    gpu(name, (8, 6))
    assert machine.peak_flops(CUDA) == (tflops and pytest.approx(tflops * 1e12))


# -- Windows and macOS, which no test machine runs: Linux without what they lack

LIKE_WINDOWS = """
import multiprocessing, os, signal, sys
sys.modules["resource"] = None
del signal.SIGUSR1, signal.alarm, signal.SIGALRM, os.fork, os.sysconf, os.sched_getaffinity
multiprocessing.set_start_method("spawn")
"""


@pytest.mark.slow
def test_training_and_the_ladder_need_nothing_that_windows_lacks(dense, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(LIKE_WINDOWS, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    given = {"dataset": str(dense), "num_workers": 1, "eval_interval": 3, "keep_memory": True, "max_steps": 4}
    command = [sys.executable, "train.py", *flags(**given, out_dir=tmp_path / "windows")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    train.train(tiny(**given, out_dir=str(tmp_path / "linux")))
    windows, linux = (
        rows(tiny(out_dir=str(tmp_path / name)), "step", "train_loss", "val_loss") for name in ("windows", "linux")
    )
    assert windows == linux and len(windows) == 4
    assert not any("peak_memory_gb" in row for row in rows(tiny(out_dir=str(tmp_path / "windows"))))
    listing = [sys.executable, "ladder.py", "list"]
    assert subprocess.run(listing, cwd=ROOT, env=environment, capture_output=True).returncode == 0


def test_a_process_may_open_as_many_files_as_its_hard_limit_allows():
    resource = pytest.importorskip("resource")  # not on Windows
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        machine.allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
