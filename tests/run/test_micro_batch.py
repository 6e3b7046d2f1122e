"""Memory of a run: finds the micro-batch that fits, and explains out-of-memory errors."""

import errno
import json
import mmap
import re
import sys
import weakref
from pathlib import Path

import pytest
import torch
from conftest import needs_gpu, replace, rows, saved, spy, tiny, words
from processes import python, script, torchrun

import train
from nanoladder import machine
from nanoladder.run import micro_batch

CPU = torch.device("cpu")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture
def config(dense, tmp_path):
    return tiny(dataset=str(dense), out_dir=str(tmp_path / "run"), max_steps=2, batch_size=12)


# -- micro_batch_size=auto


def running_out(above, at_step=1):
    """A train_step that runs out of memory above this micro-batch size (sequences), from its at_step-th call on.

    Returns it, and a list that collects the micro-batch sizes of its calls.
    """
    original, sizes = train.train_step, []

    def step(model, optimizer, scaler, batch, lr, config):
        sizes.append(config.micro_batch_size)
        if config.micro_batch_size > above and len(sizes) >= at_step:
            raise torch.OutOfMemoryError(str(FULL))  # a new one: an old one's traceback would hold the model
        return original(model, optimizer, scaler, batch, lr, config)

    return step, sizes


@pytest.mark.parametrize("at_step, save_interval", [(1, 100), (3, 1)])
def test_auto_halves_the_micro_batch_until_it_fits(at_step, save_interval, config, monkeypatch, run_main):
    """The run continues from the last checkpoint, or from the beginning, and trains as if the size had been given.

    The model that did not fit is gone before the next one is built.
    """
    alive, build_model = [], train.build_model

    def build(config, device):
        assert not any(model() for model in alive)
        model = build_model(config, device)
        alive.append(weakref.ref(model))
        return model

    given = {"micro_batch_size": "auto", "max_steps": 4, "save_interval": save_interval}
    with monkeypatch.context() as patch:
        step, sizes = running_out(3, at_step)
        patch.setattr(train, "train_step", step)
        patch.setattr(train, "build_model", build)
        result = run_main(train.main, *words(config, **given))
    assert result.code == 0 and list(dict.fromkeys(sizes)) == [12, 6, 3] and len(alive) == 3
    assert "micro_batch_size=12: to be halved whenever memory runs out\n" in result.out
    assert "micro_batch_size=6 does not fit (OutOfMemoryError: CUDA out of memory." in result.out
    assert json.loads(Path(config.out_dir, "config.json").read_text())["micro_batch_size"] == 3
    assert [row["step"] for row in rows(config)] == [1, 2, 3, 4]
    if at_step == 1:
        by_hand = replace(config, max_steps=4, micro_batch_size=3, out_dir=f"{config.out_dir}_by_hand")
        train.train(by_hand)
        assert rows(config, "train_loss", "grad_norm") == rows(by_hand, "train_loss", "grad_norm")


def test_each_attempt_reports_its_own_peak_memory(config, run_main, monkeypatch):
    """The previous attempt touched 300 MB more, which the process's peak resident memory would still include."""
    original = train.train_step

    def step(model, optimizer, scaler, batch, lr, config):
        if config.micro_batch_size == 12:
            with mmap.mmap(-1, 300_000_000) as pages:  # not from the heap, which another test may have set to keep them
                for start in range(0, len(pages), mmap.PAGESIZE):
                    pages[start] = 1
            before.append(machine.peak_memory_gb(CPU))
            raise torch.OutOfMemoryError(str(FULL))
        return original(model, optimizer, scaler, batch, lr, config)

    before = []
    monkeypatch.setattr(train, "train_step", step)
    assert run_main(train.main, *words(config, micro_batch_size="auto")).code == 0
    assert rows(config)[-1]["peak_memory_gb"] < before[0] - 0.2


def test_on_cuda_too_each_attempt_resets_the_peak_memory(monkeypatch):
    calls, device = [], torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(device))
    micro_batch.release_memory(device)
    assert calls == ["empty", device]


@pytest.mark.parametrize("before, expected", [(None, (12, "to be halved")), (2, (2, "as before")), (5, (12, "to be"))])
def test_auto_begins_with_the_previous_size_or_the_largest(before, expected, config):
    """5 does not divide the batch size: it belongs to another one."""
    config = replace(config, micro_batch_size="auto", init_from="auto")
    if before:
        train.train(replace(config, batch_size=2 * before, micro_batch_size=before))
    size, reason = micro_batch.first_micro_batch(config)
    assert size == expected[0] and reason.startswith(expected[1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system has no such limit")
def test_on_a_cpu_auto_finds_what_fits_instead_of_being_killed(config):
    """Memory really runs out: no more than 200 MB are free."""
    patch = "train.machine.memory.free_memory = lambda device: 200_000_000"
    code = f"import sys, train\n{patch}\ntrain.main(sys.argv[1:])"
    shape = {"n_embd": 64, "n_head": 4, "context_length": 128, "batch_size": 512, "attention": "sdpa"}
    result = python("-c", code, *words(config, **shape, micro_batch_size="auto"))
    assert result.returncode == 0, result.stderr
    assert "micro_batch_size=512 does not fit (" in result.stdout and "memory" in result.stdout
    assert 1 < json.loads(Path(config.out_dir, "config.json").read_text())["micro_batch_size"] < 512


def test_the_limit_of_a_cpu_s_memory_ends_with_the_run(config, monkeypatch):
    resource = pytest.importorskip("resource")
    seen = []
    spy(monkeypatch, train, "train_step", lambda *_: seen.append(limit()))

    def limit():
        return resource.getrlimit(resource.RLIMIT_DATA)[0]

    before = limit()
    train.train(replace(config, micro_batch_size="auto"))
    assert limit() == before and seen[0] != before
    with machine.within_free_memory(torch.device("cuda")):  # whose driver reserves more than there is
        assert limit() == before


UNEQUAL = """
import torch
import train
from nanoladder import parallel
from nanoladder.entry import run_script
train_step = train.train_step


def limited(model, optimizer, scaler, batch, lr, config):
    if parallel.rank() == 1 and config.micro_batch_size > 2:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return train_step(model, optimizer, scaler, batch, lr, config)


train.train_step = limited
run_script(train.main)
"""


@pytest.mark.slow
def test_several_processes_all_halve_it_when_one_runs_out(config, tmp_path):
    """torchrun restarts all of them."""
    Path(tmp_path, "unequal.py").write_text(UNEQUAL)
    given = replace(config, batch_size=8, micro_batch_size="auto", ddp=True)
    result = torchrun(tmp_path / "unequal.py", *words(given), options=["--max-restarts=1"])
    assert result.returncode == 0, result.stderr
    assert re.findall(r"micro_batch_size=(\d): (.*)", result.stdout) == [
        ("4", "to be halved whenever memory runs out"),
        ("2", "as before"),
    ]
    said = "error: out of memory: OutOfMemoryError: CUDA out of memory; the same command with --init_from=auto "
    assert f"{said}continues with micro_batch_size=2; torchrun --max-restarts=10 does so automatically" in result.stderr
    by_hand = replace(given, micro_batch_size=2, out_dir=f"{config.out_dir}_by_hand")
    assert script("train.py", *words(by_hand), n=2, folder=tmp_path).returncode == 0
    assert rows(config, "train_loss", "grad_norm") == rows(by_hand, "train_loss", "grad_norm")


def test_a_size_is_recorded_only_for_a_run_that_has_begun(config):
    train.train(replace(config, micro_batch_size=4))
    path = Path(config.out_dir, "config.json")
    keys = json.loads(path.read_text())
    began = replace(config, **keys)
    assert micro_batch.record(replace(began, n_layer=3), 2) == 0 and json.loads(path.read_text()) == keys
    for _ in range(2):  # as two processes do
        assert micro_batch.record(began, 2) == 2
        assert json.loads(path.read_text()) == vars(replace(began, micro_batch_size=2))


@needs_gpu
def test_on_a_gpu_auto_finds_what_fits(config):
    """The run is limited, so that memory really runs out."""
    shape = {"n_layer": 3, "n_head": 4, "n_embd": 128, "context_length": 128, "batch_size": 512}
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.4e9 / total)
    try:
        train.train(replace(config, **shape, device="cuda", micro_batch_size="auto"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 1 < json.loads(Path(config.out_dir, "config.json").read_text())["micro_batch_size"] < 512


# -- out of memory

LIMITED = """
import resource, sys
import train
from nanoladder import machine
from nanoladder.entry import run_script
most = machine.proc_bytes("/proc/self/status", "VmSize") + 400 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (most, most))
run_script(train.main)
"""


@pytest.mark.slow
def test_a_run_that_can_allocate_no_more_is_explained_and_its_checkpoint_is_intact(config):
    config = replace(config, n_embd=128, n_head=4, context_length=128, n_layer=3, attention="sdpa")
    train.train(config)
    given = {"batch_size": 256, "max_steps": 4, "init_from": "resume"}
    result = python("-c", LIMITED, *words(config, **given))
    assert result.returncode == 3 and "Traceback" not in result.stderr, result.stderr
    assert "can't allocate memory" in result.stderr
    assert f"{config.out_dir}/last.safetensors is the newest checkpoint: --init_from=resume" in result.stdout
    assert saved(config)["progress"]["step"] == 2
    assert f"expected a smaller step, by {micro_batch.SMALLER}" in result.stderr


def test_memory_that_runs_out_in_a_step_is_explained_in_one_line(config, run_main, monkeypatch):
    def train_step(*_):
        raise FULL

    monkeypatch.setattr(train, "train_step", train_step)
    result = run_main(train.main, *words(config))
    assert result.code == 3 and result.err.count("error: ") == 1 and result.err.count("\n") == 1
    assert result.err.startswith("error: out of memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00")
    assert f"GiB; expected a smaller step, by {micro_batch.SMALLER}" in result.err
    assert result.err.endswith("docs/memory.md shows how to predict each\n")


def of_the_compiler(text):
    return type("CppCompileError", (RuntimeError,), {"__module__": "torch._inductor.exc"})(text)


@pytest.mark.parametrize(
    "error, expected",
    [
        (FULL, True),
        (MemoryError(), True),
        (RuntimeError("can't start new thread"), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (of_the_compiler("C++ compile error\n\nvirtual memory exhausted: Cannot allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_only_memory_errors_count_as_out_of_memory(error, expected):
    assert machine.is_out_of_memory(error) is expected


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), BlockingIOError(11, "unavailable")])
def test_threads_that_cannot_start_are_not_a_matter_of_the_step_s_memory(error, config, run_main, monkeypatch):
    def train_step(*_):
        raise error

    monkeypatch.setattr(train, "train_step", train_step)
    result = run_main(train.main, *words(config))
    assert str(result.code).startswith("error: no more threads or processes can start (")
    assert "ulimit -u" in result.code and "memory" not in result.code


def test_in_limited_memory_a_thread_that_cannot_start_lacks_memory(monkeypatch):
    error = RuntimeError("can't start new thread")
    with machine.within_free_memory(CPU):
        assert machine.is_out_of_memory(error) is (sys.platform == "linux")
