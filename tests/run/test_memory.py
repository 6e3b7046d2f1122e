"""A run keeps within the memory that there is: it finds its micro-batch, it warns, it explains."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, flags, needs_gpu, replace, rows, saved, tiny
from processes import words, work

import train
from lab import plan, predict
from nanoladder import machine
from nanoladder.config import load_config
from nanoladder.errors import BadInput
from nanoladder.run import memory

CPU = torch.device("cpu")
# Of 3 MB a sequence, and 10 MB at rest; a process needs 0.12 GB more, for what its first step imports.
SMALL = {"n_layer": 3, "n_head": 4, "n_embd": 128, "context_length": 128, "batch_size": 8, "max_steps": 2}
SMALL |= {"attention": "sdpa"}


@pytest.fixture
def config(dense, tmp_path):
    return tiny(**SMALL, dataset=str(dense), out_dir=str(tmp_path / "run"))


def known(config):
    return replace(config, vocab_size=17)


# -- micro_batch_size=auto


def test_auto_trains_as_the_number_that_it_finds(config, run_main):
    """A micro-batch of 64 is predicted to fit; it does not, for what the process takes besides."""
    given = vars(config) | {"batch_size": 128, "micro_batch_size": "auto", "memory_gb": 0.28}
    result = run_main(train.main, *flags(**given))
    tried = [int(line.split()[-1]) for line in result.out.splitlines() if "trying" in line]
    found = json.loads(Path(config.out_dir, "config.json").read_text())["micro_batch_size"]
    assert tried[:2] == [64, 32] and tried == sorted(tried, reverse=True) and tried[-1] == found
    assert f"\nmicro     {found} at a time, the most that fits: a trial took 0." in result.out
    assert "of 0.280 GB, of which 10% stay free" in result.out
    by_hand = replace(config, batch_size=128, micro_batch_size=found, out_dir=f"{config.out_dir}_by_hand")
    train.train(by_hand)
    assert rows(config, "train_loss", "grad_norm") == rows(by_hand, "train_loss", "grad_norm")


def trials(monkeypatch, most, bytes_taken):
    """Replaces the trials: what is at most `most` fits and takes bytes_taken(size). Returns what is tried."""
    tried = []

    def trial(config, size, device, there):
        tried.append(size)
        return bytes_taken(size) if size <= most else None

    monkeypatch.setattr(memory, "trial", trial)
    return tried


@pytest.mark.parametrize(
    "most, share_taken, expected",
    [
        (12, 1.0, [4]),  # as predicted
        (2, 1.0, [4, 3, 2]),  # more is needed than predicted
        (12, 0.3, [4, 6, 12]),  # less, as compiled steps do
        (6, 0.3, [4, 6, 12]),  # less, but not that much
        (4, 0.3, [4, 6]),
    ],
)
def test_trials_begin_at_the_prediction(most, share_taken, expected, config, monkeypatch):
    config = replace(known(config), batch_size=12, micro_batch_size="auto")
    peak = predict.predict_memory(replace(config, micro_batch_size=4)).peak
    config = replace(config, memory_gb=1.01 * peak / (1 - memory.MARGIN) / 1e9)
    tried = trials(monkeypatch, most, lambda size: share_taken * peak * size / 4)
    size, why = memory.largest_micro_batch(config, CPU)
    assert tried == expected and size == max(size for size in expected if size <= most)
    assert why.startswith(f"{size} at a time, {'all of the batch' if size == 12 else 'the most that fits'}: a trial")


def test_where_nothing_fits_the_program_says_what_would(config, monkeypatch, run_main):
    tried = trials(monkeypatch, 0, None)
    result = run_main(train.main, *flags(**vars(config) | {"micro_batch_size": "auto", "memory_gb": 0.012}))
    assert result.code == 3 and tried == [1]
    assert "error: out of memory: MemoryError: micro_batch_size=auto: not one sequence fits" in result.err
    assert "--checkpointing=every:1" in result.err and not Path(config.out_dir).exists()


@pytest.mark.parametrize(
    "returncode, said, fits",
    [
        (0, '{"bytes": 7}', 7),
        (-9, "", None),
        (1, "error: out of memory", None),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", None),
        (1, "MemoryError", None),
    ],
)
def test_a_trial_that_runs_out_of_memory_does_not_fit(returncode, said, fits, config, monkeypatch):
    result = SimpleNamespace(returncode=returncode, stdout=said, stderr=said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: result)
    assert memory.trial(config, 2, CPU, 1e9) == fits


def test_a_trial_that_fails_otherwise_is_no_matter_of_memory(config, monkeypatch):
    result = SimpleNamespace(returncode=2, stdout="", stderr="error: torch.compile failed: no g++")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: result)
    with pytest.raises(BadInput, match=r"the trial of 2 failed: torch.compile failed: no g\+\+"):
        memory.trial(config, 2, CPU, 1e9)


def test_only_training_finds_a_micro_batch():
    for options in (["--mode=predict"], ["--mode=sweep"], []):
        with pytest.raises(BadInput, match="micro_batch_size=auto"):
            plan.parse([*options, "--micro_batch_size=auto"])
    with pytest.raises(BadInput, match="micro_batch_size=auto"):
        predict.predict_memory(load_config(["--micro_batch_size=auto", "--vocab_size=9"]))


def test_two_processes_take_what_the_first_one_finds(config, tmp_path):
    given = {"ddp": True, "batch_size": 16, "log_interval": 1}
    alone = replace(config, **given, micro_batch_size=8)
    train.train(alone)
    both = replace(config, **given, micro_batch_size="auto", memory_gb=0.5, out_dir=str(tmp_path / "both"))
    result, seen = work(tmp_path / "work", {"auto": {"argv": words(both)}}, 2)
    assert result.returncode == 0 and len(seen) == 2, result.stderr
    assert result.stdout.count("trying 8") == 1 and "micro     8 at a time" in result.stdout
    ours, theirs = ([row["train_loss"] for row in rows(run)] for run in (both, alone))
    assert ours == pytest.approx(theirs, rel=1e-4)


@needs_gpu
def test_on_a_gpu_a_trial_leaves_nothing_behind(config):
    device = torch.device("cuda", 0)
    config = replace(known(config), device="cuda", batch_size=256, micro_batch_size="auto", memory_gb=0.4)
    free, reserved = machine.free_memory(device), torch.cuda.memory_reserved(device)
    size, _ = memory.largest_micro_batch(config, device)
    assert 1 < size < 256
    assert machine.free_memory(device) == pytest.approx(free, rel=0.01)
    assert torch.cuda.memory_reserved(device) == reserved
    assert memory.trial(config, size, device, 0.4e9) < 0.36e9 and memory.trial(config, 256, device, 0.4e9) is None


# -- out of memory

LIMITED = """
import resource, sys
import train
from nanoladder import machine
from nanoladder.entry import run
most = machine.proc_bytes("/proc/self/status", "VmSize") + int(sys.argv.pop(1)) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (most, most))
run(train.main)
"""


def test_a_run_that_can_allocate_no_more_is_explained_and_its_checkpoint_is_intact(config):
    train.train(config)
    given = vars(config) | {"batch_size": 256, "max_steps": 4, "init_from": "resume"}
    command = [sys.executable, "-c", LIMITED, "400", *flags(**given)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 3 and "Traceback" not in result.stderr, result.stderr
    assert "can't allocate memory" in result.stderr
    assert f"{config.out_dir}/last.pt, the last checkpoint, is intact: --init_from=resume" in result.stderr
    assert saved(config)["progress"]["step"] == 2
    fits = [line.split() for line in result.stderr.splitlines() if "the first that fits" in line]
    assert len(fits) == 1 and fits[0][0].startswith("--micro_batch_size=")


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), MemoryError()],
    ids=["accelerator", "python"],
)
def test_memory_that_runs_out_in_a_step_is_explained_once(error, config, run_main, monkeypatch):
    def train_step(*_):
        raise error

    monkeypatch.setattr(train, "train_step", train_step)
    monkeypatch.setattr(predict, "trace", lambda config, _: predict.Memory(*[0] * 7, peak=10**9 * config.batch_size))
    given = vars(config) | {"memory_gb": 6.0, "micro_batch_size": 8}
    result = run_main(train.main, *flags(**given))
    assert result.code == 3 and result.err.count("error: out of memory: ") == 1
    assert type(error).__name__ in result.err and "predicted to take 8.000 GB of the 6.000 GB" in result.err
    assert "--micro_batch_size=4       4.000 GB  the first that fits" in result.err


def test_what_auto_found_is_explained(config, run_main, monkeypatch):
    def train_step(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(train, "train_step", train_step)
    monkeypatch.setattr(predict, "trace", lambda config, _: predict.Memory(*[0] * 7, peak=10**9 * config.batch_size))
    tried = trials(monkeypatch, 4, lambda size: 10**9 * size)
    given = vars(config) | {"memory_gb": 6.0, "batch_size": 12, "micro_batch_size": "auto"}
    result = run_main(train.main, *flags(**given))
    assert result.code == 3 and tried == [4]
    assert "predicted to take 4.000 GB of the 6.000 GB" in result.err
    assert "--micro_batch_size=3       3.000 GB  the first that fits" in result.err


def test_a_gpu_that_others_have_filled_is_named_in_one_line(config, run_main, monkeypatch):
    def full(*_):
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(train, "set_up", full)
    monkeypatch.setattr(memory, "explanation", full)
    result = run_main(train.main, *flags(**vars(config)))
    assert result.code == 3 and result.err.count("\n") == 1
    assert result.err.endswith("end what else runs on the GPU, or choose another --device\n")


def test_other_errors_are_not_taken_for_memory(config, monkeypatch, run_main):
    def train_step(*_):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(train, "train_step", train_step)
    with pytest.raises(RuntimeError, match="mat1"):
        train.main(flags(**vars(config)))


def test_what_saves_memory_comes_by_its_cost_and_only_if_it_is_off(config, monkeypatch):
    monkeypatch.setattr(machine, "choose_dtype", lambda name, device: torch.bfloat16)
    naive = replace(known(config), attention="matmul", vocab_size=2000)
    order = ["set_to_none", "attention", "dtype", "loss_chunks", "micro_batch_size", "checkpointing"]
    found = list(memory.savings(naive, torch.device("cuda"), 0.05e9))
    keys = [key for key, _, _ in found]
    assert keys[-1] != "optimizer" or keys.pop()
    assert keys == [key for key in order if key in keys] and set(order) - set(keys) <= {"set_to_none", "loss_chunks"}
    now = predict.predict_memory(naive, "cuda").peak
    for key, value, peak in found:
        changed = replace(naive, **{key: value})
        assert peak == predict.predict_memory(changed, "cuda").peak < now
        assert key not in [other for other, _, _ in memory.savings(changed, torch.device("cuda"), 1e12)] or key == (
            "micro_batch_size"
        )


def test_an_optimizer_that_cannot_be_predicted_is_tried_and_explained_without_figures(config, monkeypatch, capsys):
    def predict(*_):
        raise BadInput("it is not there")

    monkeypatch.setattr(predict, "predict_memory", predict)
    tried = trials(monkeypatch, 0, None)
    with pytest.raises(MemoryError):
        memory.largest_micro_batch(replace(known(config), micro_batch_size="auto", memory_gb=1.0), CPU)
    assert tried == [8, 4, 2, 1]
    memory.warn(replace(known(config), memory_gb=1e-3), CPU)
    assert memory.explanation(known(config), CPU, 1e6, "why") == "why" and capsys.readouterr().err == ""


def test_sharding_is_advised_to_several_processes_only(config, monkeypatch):
    assert "shard" not in [key for key, _, _ in memory.savings(known(config), CPU, 1e6)]
    monkeypatch.setattr(memory.parallel, "world_size", lambda: 4)
    large = replace(known(config), n_embd=512)
    assert "shard" in [key for key, _, _ in memory.savings(large, CPU, 1e6)]


# -- before training on a CPU, whose system ends what takes too much


def test_a_step_that_may_not_fit_is_warned_of_in_one_line(config, monkeypatch, capsys):
    peak = predict.predict_memory(known(config)).peak
    monkeypatch.setattr(machine, "free_memory", lambda _: peak - 10**6)
    train.train(config)
    line = capsys.readouterr().err
    assert line.startswith("warning: a step is predicted to take 0.0") and line.count("\n") == 1
    assert "is predicted to fit" in line and rows(config)[-1]["step"] == 2  # it is tried all the same


def test_a_step_that_fits_is_not_spoken_of_and_a_small_one_not_even_predicted(config, monkeypatch, capsys):
    peak = predict.predict_memory(known(config)).peak
    monkeypatch.setattr(machine, "free_memory", lambda _: peak + 10**6)
    memory.warn(known(config), CPU)
    monkeypatch.setattr(predict, "predict_memory", None)
    monkeypatch.setattr(machine, "free_memory", lambda _: 8 * peak)
    memory.warn(known(config), CPU)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words",
    [[], ["config/gpt2.py", "--stage=naive"], ["config/gpt2.py", "--checkpointing=every:1", "--micro_batch_size=1"]],
)
def test_the_rough_prediction_is_below_the_precise_one_by_less_than_the_quarter_that_calls_for_it(words):
    config = load_config([*words, "--vocab_size=50257", "--n_layer=2"])
    assert 1 < predict.predict_memory(config).peak / memory.rough(config, 1) < 4


def test_free_memory_is_less_where_the_process_is_limited_or_shares_it(monkeypatch):
    free = machine.free_memory(CPU)
    assert 1e8 < free < 1e14
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.free_memory(CPU) == pytest.approx(free / 4, rel=0.2)
    size = machine.proc_bytes("/proc/self/status", "VmSize")
    limits = {resource.RLIMIT_AS: size + 2**20, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (limits[limit], resource.RLIM_INFINITY))
    assert machine.free_memory(CPU) == pytest.approx(2**20, rel=0.9)
