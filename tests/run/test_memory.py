"""Memory of a run: finds the micro-batch that fits, warns, and explains out-of-memory errors."""

import json
import resource
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, flags, needs_gpu, replace, rows, saved, tiny

import train
from lab import advise, plan, predict
from lab.trace import Memory
from nanoladder import machine
from nanoladder.errors import BadInput
from nanoladder.run import load_config, memory

CPU = torch.device("cpu")
# 3 MB a sequence, and 10 MB at rest; a process needs 0.12 GB more, for the libraries that its first step imports.
SMALL = {"n_layer": 3, "n_head": 4, "n_embd": 128, "context_length": 128, "batch_size": 8, "max_steps": 2}
SMALL |= {"attention": "sdpa"}


@pytest.fixture
def config(dense, tmp_path):
    return tiny(**SMALL, dataset=str(dense), out_dir=str(tmp_path / "run"))


@pytest.fixture
def in_process(monkeypatch):
    """Predictions are made in this process, where a test can replace their parts; a child takes seconds to start."""

    def ask(question, config, device, available):
        config = replace(config, device=str(device), vocab_size=config.vocab_size or 17)
        found = advise.answer(question, config, int((1 - memory.MARGIN) * available), memory.parallel.world_size())
        return json.loads(json.dumps(found))

    monkeypatch.setattr(memory, "ask", ask)


def with_vocabulary(config):
    return replace(config, vocab_size=17)


# -- micro_batch_size=auto


def running_out(above, at_step=1):
    """train_step, for which memory runs out if a micro-batch has more than `above` sequences, from that step on."""
    original, steps = train.train_step, []

    def step(model, optimizer, batch, lr, config):
        steps.append((config.micro_batch_size, lr))
        if config.micro_batch_size > above and len(steps) >= at_step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(model, optimizer, batch, lr, config)

    return step, steps


@pytest.mark.parametrize("at_step, save_interval", [(1, 100), (3, 100), (3, 1)])
def test_auto_halves_the_micro_batch_until_it_fits(at_step, save_interval, config, monkeypatch, run_main):
    """It goes on from the last checkpoint, or from the beginning, and trains as if the number had been given."""
    given = vars(config) | {"batch_size": 12, "micro_batch_size": "auto", "max_steps": 4, "memory_gb": 50.0}
    given |= {"save_interval": save_interval}
    monkeypatch.setattr(memory, "ask", lambda *_: {"micro_batch_size": 12})
    with monkeypatch.context() as patch:
        step, steps = running_out(3, at_step)
        patch.setattr(train, "train_step", step)
        result = run_main(train.main, *flags(**given))
    assert result.code == 0 and list(dict.fromkeys(size for size, _ in steps)) == [12, 6, 3]
    assert "micro_batch_size=12: the most predicted to fit" in result.out
    assert "micro_batch_size=6 does not fit (OutOfMemoryError: CUDA out of memory." in result.out
    assert json.loads(Path(config.out_dir, "config.json").read_text())["micro_batch_size"] == 3
    assert [row["step"] for row in rows(config)] == [1, 2, 3, 4]
    if at_step == 1:
        by_hand = replace(config, batch_size=12, max_steps=4, micro_batch_size=3, out_dir=f"{config.out_dir}_by_hand")
        train.train(by_hand)
        assert rows(config, "train_loss", "grad_norm") == rows(by_hand, "train_loss", "grad_norm")


def test_auto_that_does_not_fit_with_one_sequence_is_explained(config, in_process, monkeypatch, run_main):
    monkeypatch.setattr(train, "train_step", running_out(0)[0])
    replace_traces(monkeypatch)
    given = vars(config) | {"batch_size": 12, "micro_batch_size": "auto", "memory_gb": 50.0}
    result = run_main(train.main, *flags(**given))
    assert result.code == 3 and "micro_batch_size=3 does not fit" in result.out
    assert "predicted to take 1.000 GB, of 50.000 GB available on cpu" in result.err


def test_the_model_that_did_not_fit_is_gone_before_a_smaller_one_is_tried(config, monkeypatch, run_main):
    alive, build_model = [], train.build_model

    def build(config, device):
        assert not any(model() for model in alive)
        model = build_model(config, device)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(memory, "ask", lambda *_: {"micro_batch_size": 8})
    monkeypatch.setattr(train, "build_model", build)
    monkeypatch.setattr(train, "train_step", running_out(2)[0])
    given = vars(config) | {"micro_batch_size": "auto", "memory_gb": 50.0}
    assert run_main(train.main, *flags(**given)).code == 0 and len(alive) == 3  # 8, 4, 2


@pytest.mark.parametrize(
    "before, predicted, several, expected",
    [
        (None, 3, False, (3, "the most predicted to fit into 1.000 GB, of which 10% stay free")),
        (2, 6, False, (2, "as before")),
        (5, 6, False, (6, "the most predicted to fit")),  # of another batch_size
        (None, None, False, (12, "there is no prediction")),
        (None, None, True, (1, "there is no prediction")),
    ],
)
def test_auto_begins_with_the_size_before_or_the_prediction(before, predicted, several, expected, config, monkeypatch):
    config = replace(with_vocabulary(config), batch_size=12, micro_batch_size="auto", init_from="auto", memory_gb=1.0)
    if before:
        train.train(replace(config, vocab_size=0, batch_size=2 * before, micro_batch_size=before))
    monkeypatch.setattr(memory, "ask", lambda *_: {} if predicted is None else {"micro_batch_size": predicted})
    monkeypatch.setattr(memory.parallel, "world_size", lambda: 2 if several else 1)
    size, reason = memory.choose_micro_batch(config, CPU)
    assert size == expected[0] and reason.startswith(expected[1])


def test_if_nothing_fits_the_program_says_what_would(config, in_process, run_main):
    result = run_main(train.main, *flags(**vars(config) | {"micro_batch_size": "auto", "memory_gb": 1e-3}))
    assert result.code == 3
    assert "error: out of memory: MemoryError: micro_batch_size=auto: not one sequence is predicted" in result.err
    assert "--checkpointing=every:1" in result.err and not Path(config.out_dir).exists()


@pytest.mark.slow
def test_auto_predicts_in_a_child_that_a_train_py_here_does_not_mislead(config, monkeypatch, tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    peak = predict.predict_memory(replace(with_vocabulary(config), micro_batch_size=4)).peak
    given = replace(with_vocabulary(config), micro_batch_size="auto", stage="loader")
    answer = memory.ask("micro_batch_size", given, CPU, 1.01 * peak / (1 - memory.MARGIN))
    assert answer == {"micro_batch_size": 4}


def test_only_training_finds_a_micro_batch():
    for options in (["--mode=predict"], ["--vary=stages"], []):
        with pytest.raises(BadInput, match="micro_batch_size=auto"):
            plan.parse([*options, "--micro_batch_size=auto"])
    with pytest.raises(BadInput, match="micro_batch_size=auto"):
        predict.predict_memory(load_config(["--micro_batch_size=auto", "--vocab_size=9"]))


@needs_gpu
def test_on_a_gpu_auto_finds_what_fits(config):
    """The prediction counts no workspaces; the run itself is limited, so that memory really runs out."""
    given = replace(config, device="cuda", batch_size=512, micro_batch_size="auto", memory_gb=0.4)
    try:
        train.train(given)
    finally:
        machine.limit_memory(torch.device("cuda", 0), 1e15)
    assert 1 < json.loads(Path(config.out_dir, "config.json").read_text())["micro_batch_size"] < 512


# -- one copy of train.py in a process

AS_A_SCRIPT = """
import runpy, sys
runpy.run_path("train.py", run_name="__main__")
own = {name.partition(".")[0] for name in sys.modules}
print("imported:", sorted(own & {"train", "lab", "nanoladder"}))
"""


@pytest.mark.slow
def test_training_imports_neither_train_a_second_time_nor_lab(config):
    given = vars(config) | {"micro_batch_size": "auto", "memory_gb": 1.0}
    result = subprocess.run(
        [sys.executable, "-c", AS_A_SCRIPT, *flags(**given)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "micro_batch_size=8: " in result.stdout
    assert result.stdout.endswith("imported: ['nanoladder']\n")


# -- out of memory

LIMITED = """
import resource, sys
import train
from nanoladder import machine
from nanoladder.entry import run_script
most = machine.proc_bytes("/proc/self/status", "VmSize") + int(sys.argv.pop(1)) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (most, most))
run_script(train.main)
"""


def run_limited(mebibytes, **keys):
    """Runs train.py in a process that may allocate no more than this many MiB after its imports."""
    command = [sys.executable, "-c", LIMITED, str(mebibytes), *flags(**keys)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_run_that_can_allocate_no_more_is_explained_and_its_checkpoint_is_intact(config):
    train.train(config)
    given = vars(config) | {"batch_size": 256, "max_steps": 4, "init_from": "resume"}
    result = run_limited(400, **given)
    assert result.returncode == 3 and "Traceback" not in result.stderr, result.stderr
    assert "can't allocate memory" in result.stderr
    assert f"{config.out_dir}/last.safetensors, the newest checkpoint, is intact: --init_from=resume" in result.stderr
    assert saved(config)["progress"]["step"] == 2
    fits = [line.split() for line in result.stderr.splitlines() if "the first that fits" in line]
    assert len(fits) == 1 and fits[0][0].startswith("--micro_batch_size="), result.stderr


def no_process(*_, **__):
    raise MemoryError


def killed(*_, **__):
    return SimpleNamespace(returncode=-9, stdout="", stderr="")


def failed(*_, **__):
    return SimpleNamespace(returncode=1, stdout="", stderr="Traceback ...\nMemoryError")


@pytest.mark.parametrize("run", [no_process, killed, failed])
def test_a_prediction_that_fails_leaves_an_explanation_without_figures(run, config, run_main, monkeypatch):
    train.train(config)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(train, "train_step", no_process)
    result = run_main(train.main, *flags(**vars(config) | {"max_steps": 4, "init_from": "resume"}))
    last = f"{config.out_dir}/last.safetensors"
    checkpoint = f"{last}, the newest checkpoint, is intact: --init_from=resume continues from it."
    assert result.code == 3 and result.err.splitlines() == ["error: out of memory: MemoryError: ", checkpoint]


def replace_traces(monkeypatch):
    """Makes each sequence of a micro-batch take a gigabyte, as predicted."""

    def trace(config, *_, **__):
        return Memory(*[0] * 6, peak=10**9 * config.batch_size), None

    monkeypatch.setattr(predict, "trace", trace)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), MemoryError()],
    ids=["accelerator", "python"],
)
def test_memory_that_runs_out_in_a_step_is_explained_once(error, config, in_process, run_main, monkeypatch):
    def train_step(*_):
        raise error

    monkeypatch.setattr(train, "train_step", train_step)
    replace_traces(monkeypatch)
    given = vars(config) | {"memory_gb": 6.0, "micro_batch_size": 8}
    result = run_main(train.main, *flags(**given))
    assert result.code == 3 and result.err.count("error: out of memory: ") == 1
    assert type(error).__name__ in result.err and "predicted to take 8.000 GB, of 6.000 GB available" in result.err
    assert "--micro_batch_size=4       4.000 GB  the first that fits" in result.err


def test_a_gpu_that_others_have_filled_is_named_in_one_line(config, monkeypatch, capsys):
    def full(*_):
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(machine, "free_memory", full)
    memory.explain("MemoryError", config, torch.device("cuda", 0))
    line = capsys.readouterr().err
    assert line.endswith("end other processes on the GPU, or choose another --device\n") and line.count("\n") == 1


@pytest.mark.parametrize(
    "error, expected",
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError("out of memory"), False),
    ],
)
def test_only_errors_of_memory_are_taken_for_it(error, expected):
    assert memory.is_out_of_memory(error) is expected


def test_other_errors_pass(config, monkeypatch):
    def train_step(*_):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(train, "train_step", train_step)
    with pytest.raises(RuntimeError, match="mat1"):
        train.main(flags(**vars(config)))


# -- before training on a CPU, whose system kills processes that take too much


def test_a_step_that_may_not_fit_is_warned_of_in_one_line(config, in_process, monkeypatch, capsys):
    peak = predict.predict_memory(with_vocabulary(config)).peak
    monkeypatch.setattr(machine, "free_memory", lambda _: peak - 10**6)
    train.train(config)
    line = capsys.readouterr().err
    assert line.startswith("warning: a step is predicted to take 0.0") and line.count("\n") == 1
    assert "is predicted to fit" in line and rows(config)[-1]["step"] == 2  # it runs all the same


def test_a_step_that_fits_is_not_warned_of(config, in_process, monkeypatch, capsys):
    peak = predict.predict_memory(with_vocabulary(config)).peak
    monkeypatch.setattr(machine, "free_memory", lambda _: peak + 10**6)
    memory.warn_if_too_large(with_vocabulary(config), CPU)
    assert capsys.readouterr().err == ""


def test_a_step_that_fits_easily_starts_no_process(config, monkeypatch):
    peak = predict.predict_memory(with_vocabulary(config)).peak
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(machine, "free_memory", lambda _: 100 * peak)
    memory.warn_if_too_large(with_vocabulary(config), CPU)


def test_without_a_prediction_nothing_is_warned_of(config, monkeypatch, capsys):
    monkeypatch.setattr(memory, "ask", lambda *_: {})
    memory.warn_if_too_large(replace(with_vocabulary(config), memory_gb=1e-3), CPU)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words",
    [["config/gpt2.py", "--stage=naive"], ["config/gpt2.py", "--checkpointing=every:1", "--micro_batch_size=1"]],
)
def test_no_step_that_may_not_fit_is_taken_for_a_small_one(words):
    config = load_config([*words, "--vocab_size=50257", "--n_layer=2", "--compile=False"])
    assert predict.predict_memory(config).peak < memory.bound_peak(config)


def test_free_memory_is_less_if_the_process_is_limited_or_shares_it(monkeypatch):
    free = machine.free_memory(CPU)
    assert 1e8 < free < 1e14
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.free_memory(CPU) == pytest.approx(free / 4, rel=0.2)
    size = machine.proc_bytes("/proc/self/status", "VmSize")
    limits = {resource.RLIMIT_AS: size + 2**20, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (limits[limit], resource.RLIM_INFINITY))
    assert machine.free_memory(CPU) == pytest.approx(2**20, rel=0.9)


@pytest.mark.parametrize("name", ["CppCompileError", "InvalidCxxCompiler"])
def test_memory_that_runs_out_in_the_compiler_is_out_of_memory(name):
    """Its first line names the compiler, a later one the memory."""
    kind = type(name, (RuntimeError,), {"__module__": "torch._inductor.exc"})
    assert memory.is_out_of_memory(kind("C++ compile error\n\nvirtual memory exhausted: Cannot allocate memory"))
    assert not memory.is_out_of_memory(kind("C++ compile error\n\nno such file"))
    assert not memory.is_out_of_memory(RuntimeError("shapes\nout of memory"))
