"""Memory of a run: finds the micro-batch that fits, warns, and explains out-of-memory errors."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, build, flags, needs_gpu, replace, rows, saved, tiny
from processes import words, work

import train
from lab import advise, plan, predict
from lab.trace import Memory
from nanoladder import machine
from nanoladder.data import Batch
from nanoladder.errors import BadInput
from nanoladder.parallel.mesh import Grid, Mesh
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


def explained(config, available=0):
    """The lines that explain why memory ran out."""
    return list(memory.explanation(config, CPU, available))


# -- micro_batch_size=auto


@pytest.mark.slow
def test_auto_trains_as_the_number_that_it_finds(config, run_main):
    """A micro-batch of 64 is predicted to fit. It does not, as the process itself takes memory too."""
    given = vars(config) | {"batch_size": 128, "micro_batch_size": "auto", "memory_gb": 0.28}
    result = run_main(train.main, *flags(**given))
    tried = [int(line.split()[-1]) for line in result.out.splitlines() if "trying" in line]
    found = json.loads(Path(config.out_dir, "config.json").read_text())["micro_batch_size"]
    assert tried[:2] == [64, 32] and tried == sorted(tried, reverse=True) and tried[-1] == found
    assert f"\nmicro_batch_size={found}: the most that fits; a trial took 0." in result.out
    assert "of 0.280 GB, of which 10% stay free\n" in result.out
    by_hand = replace(config, batch_size=128, micro_batch_size=found, out_dir=f"{config.out_dir}_by_hand")
    train.train(by_hand)
    assert rows(config, "train_loss", "grad_norm") == rows(by_hand, "train_loss", "grad_norm")


def replace_trials(monkeypatch, largest, bytes_taken):
    """Replaces the trials: sizes up to `largest` fit and take bytes_taken(size). Returns the list of sizes tried."""
    tried = []

    def trial(config, size, device, available):
        tried.append(size)
        return bytes_taken(size) if size <= largest else None

    monkeypatch.setattr(memory, "trial", trial)
    return tried


@pytest.mark.parametrize(
    "largest, share_taken, expected",
    [
        (12, 1.0, [4]),  # as predicted
        (2, 1.0, [4, 3, 2]),  # more than predicted
        (12, 0.3, [4, 6, 12]),  # less, as compiled steps do
        (6, 0.3, [4, 6, 12]),  # less, but not that much
        (4, 0.3, [4, 6]),
    ],
)
def test_trials_start_from_the_prediction(largest, share_taken, expected, config, in_process, monkeypatch):
    config = replace(with_vocabulary(config), batch_size=12, micro_batch_size="auto")
    peak = predict.predict_memory(replace(config, micro_batch_size=4)).peak
    config = replace(config, memory_gb=1.01 * peak / (1 - memory.MARGIN) / 1e9)
    tried = replace_trials(monkeypatch, largest, lambda size: share_taken * peak * size / 4)
    size, reason = memory.find_micro_batch(config, CPU)
    assert tried == expected and size == max(size for size in expected if size <= largest)
    assert reason.startswith("the whole batch of a process;" if size == 12 else "the most that fits; a trial took")


@pytest.mark.parametrize(
    "before, memory_gb, tried, found",
    [
        (3, 5.0, [3], 3),  # 4 would fit, too
        (3, 7.0, [3, 6], 6),  # twice as many fit
        (3, 2.0, [3, 2], 2),  # it does not fit any more
        (12, 50.0, [12], 12),  # the whole batch
        (5, 5.0, [4], 4),  # of another batch_size
    ],
)
def test_a_resumed_run_keeps_its_micro_batch(before, memory_gb, tried, found, config, monkeypatch, run_main):
    train.train(config)
    Path(config.out_dir, "config.json").write_text(json.dumps({"micro_batch_size": before}))
    monkeypatch.setattr(memory, "MARGIN", 0.0)
    monkeypatch.setattr(memory, "ask", lambda *_: {"micro_batch_size": int(memory_gb)})
    seen = replace_trials(monkeypatch, memory_gb, lambda size: 1.01e9 * size)
    given = vars(config) | {"batch_size": 12, "micro_batch_size": "auto", "memory_gb": memory_gb, "max_steps": 3}
    result = run_main(train.main, *flags(**given | {"init_from": "auto"}))
    assert seen == tried and rows(config)[-1]["step"] == 3
    line = next(line for line in result.out.splitlines() if line.startswith(f"micro_batch_size={found}: "))
    assert (": as before; a trial took" in line) == (before == found)
    assert line.endswith(f"; before it was {before}") == (before != found)


def test_no_micro_batch_is_tried_twice(config, monkeypatch):
    monkeypatch.setattr(memory, "ask", lambda *_: {"micro_batch_size": 4})
    tried = replace_trials(monkeypatch, 2, lambda size: 1e9)
    config = replace(with_vocabulary(config), batch_size=12, micro_batch_size="auto", memory_gb=1.0)
    assert memory.find_micro_batch(config, CPU, before=4)[0] == 2 and tried == [4, 3, 2]


def test_without_a_run_to_resume_no_micro_batch_is_kept(config, monkeypatch):
    Path(config.out_dir).mkdir()
    Path(config.out_dir, "config.json").write_text('{"micro_batch_size": 2}')
    assert memory.size_before(replace(config, init_from="auto")) is None  # no checkpoint
    train.train(config)
    assert memory.size_before(replace(config, init_from="scratch")) is None
    assert memory.size_before(replace(config, init_from="resume")) is None  # it has trained with 0
    train.train(replace(config, micro_batch_size=4, overwrite=True))
    assert memory.size_before(replace(config, init_from="resume")) == 4


def test_if_nothing_fits_the_program_says_what_would(config, in_process, monkeypatch, run_main):
    tried = replace_trials(monkeypatch, 0, None)
    result = run_main(train.main, *flags(**vars(config) | {"micro_batch_size": "auto", "memory_gb": 0.012}))
    assert result.code == 3 and tried == [1]
    assert "error: out of memory: MemoryError: micro_batch_size=auto: not one sequence fits" in result.err
    assert "--checkpointing=every:1" in result.err and not Path(config.out_dir).exists()


def test_without_a_prediction_trials_start_from_the_whole_batch(config, monkeypatch):
    monkeypatch.setattr(memory, "ask", lambda *_: {})
    tried = replace_trials(monkeypatch, 2, lambda size: 1e9)
    config = replace(with_vocabulary(config), micro_batch_size="auto", memory_gb=1.0)
    assert memory.find_micro_batch(config, CPU)[0] == 2 and tried == [8, 4, 2]


@pytest.mark.parametrize("before, kept", [(4, True), (2, False), (8, False), (3, False)])
def test_a_sharded_step_keeps_its_micro_batch_as_predicted(before, kept, config, monkeypatch):
    monkeypatch.setattr(memory.parallel, "mesh", lambda: Mesh(Grid(data=1), n_sharing=2))
    monkeypatch.setattr(memory, "ask", lambda *_: {"micro_batch_size": 6})
    config = replace(with_vocabulary(config), batch_size=24, shard="full", micro_batch_size="auto", memory_gb=1.0)
    size, reason = memory.find_micro_batch(config, CPU, before)
    assert (size, "as before" in reason) == ((4, True) if kept else (6, False))


@pytest.mark.parametrize("fits", [True, False])
def test_a_sharded_step_is_not_tried_by_one_process_alone(fits, config, in_process, monkeypatch):
    monkeypatch.setattr(memory.parallel, "world_size", lambda: 2)
    monkeypatch.setattr(memory.parallel, "mesh", lambda: Mesh(Grid(data=2), n_sharing=2))
    tried = replace_trials(monkeypatch, 0, None)
    config = replace(with_vocabulary(config), shard="full", micro_batch_size="auto", memory_gb=1.0 if fits else 1e-6)
    if fits:
        assert memory.find_micro_batch(config, CPU)[0] == 4
    else:
        with pytest.raises(MemoryError, match="not one sequence is predicted to fit"):
            memory.find_micro_batch(config, CPU)
    assert tried == []


def test_a_sharded_step_that_is_not_predicted_takes_the_smallest_micro_batch(config, monkeypatch):
    monkeypatch.setattr(memory.parallel, "mesh", lambda: Mesh(Grid(data=2), n_sharing=2))
    monkeypatch.setattr(memory, "ask", lambda *_: {})
    config = replace(with_vocabulary(config), shard="full", micro_batch_size="auto", memory_gb=1.0)
    assert memory.find_micro_batch(config, CPU)[0] == 1


@pytest.mark.parametrize(
    "returncode, output, expected",
    [
        (0, '{"bytes": 7}', 7),
        (-9, "", None),
        (1, "error: out of memory", None),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", None),
        (1, "MemoryError", None),
    ],
)
def test_a_trial_that_runs_out_of_memory_does_not_fit(returncode, output, expected, config, monkeypatch):
    result = SimpleNamespace(returncode=returncode, stdout=output, stderr=output)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: result)
    assert memory.trial(config, 2, CPU, 1e9) == expected


def test_a_trial_that_fails_for_another_reason_is_bad_input(config, monkeypatch):
    result = SimpleNamespace(returncode=2, stdout="", stderr="error: torch.compile failed: no g++")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: result)
    with pytest.raises(BadInput, match=r"the trial of 2 failed: torch.compile failed: no g\+\+"):
        memory.trial(config, 2, CPU, 1e9)


def test_a_trial_takes_the_step_of_the_run(config, monkeypatch):
    """All keys of the run, its stage among them, reach the child; it is alone, and imports this repository's train.py.

    What differs is the size of the batch and whatever has no part in a step.
    """
    started = {}

    def start(command, env, **_):
        started.update(command=command, env=env)
        return SimpleNamespace(returncode=0, stdout='{"bytes": 7}')

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setenv("WORLD_SIZE", "2")
    keys = {"stage": "compile", "compile": True, "shard": "full", "num_workers": 2, "learning_rate": 3e-2}
    given = replace(config, **keys, micro_batch_size="auto", batch_size=8)
    memory.trial(given, 2, CPU, 1e9)
    python, *start_words = started["command"][:5]
    assert (python, start_words) == (sys.executable, ["-P", "-m", "lab.measure", "trial"])
    tried = load_config(started["command"][5:])
    changed = {"micro_batch_size": 2, "batch_size": 4, "num_workers": 0, "memory_gb": 0.9}
    assert tried == replace(given, **changed)
    assert "WORLD_SIZE" not in started["env"] and started["env"]["PYTHONPATH"].startswith(str(ROOT))


def test_only_training_finds_a_micro_batch():
    for options in (["--mode=predict"], ["--vary=stages"], []):
        with pytest.raises(BadInput, match="micro_batch_size=auto"):
            plan.parse([*options, "--micro_batch_size=auto"])
    with pytest.raises(BadInput, match="micro_batch_size=auto"):
        predict.predict_memory(load_config(["--micro_batch_size=auto", "--vocab_size=9"]))


@pytest.mark.slow
def test_two_processes_take_what_the_first_one_finds(config, tmp_path):
    given = {"ddp": True, "batch_size": 16, "log_interval": 1}
    alone = replace(config, **given, micro_batch_size=8)
    train.train(alone)
    both = replace(config, **given, micro_batch_size="auto", memory_gb=0.5, out_dir=str(tmp_path / "both"))
    result, seen = work(tmp_path / "work", {"auto": {"argv": words(both)}}, 2)
    assert result.returncode == 0 and len(seen) == 2, result.stderr
    assert result.stdout.count("trying 8") == 1 and result.stdout.count("\nmicro_batch_size=8: ") == 1
    ours, theirs = ([row["train_loss"] for row in rows(run)] for run in (both, alone))
    assert ours == pytest.approx(theirs, rel=1e-4)


@needs_gpu
def test_on_a_gpu_a_trial_leaves_nothing_behind(config):
    device = torch.device("cuda", 0)
    config = replace(with_vocabulary(config), device="cuda", batch_size=256, micro_batch_size="auto", memory_gb=0.4)
    free, reserved = machine.free_memory(device), torch.cuda.memory_reserved(device)
    size, _ = memory.find_micro_batch(config, device)
    assert 1 < size < 256
    assert machine.free_memory(device) == pytest.approx(free, rel=0.01)
    assert torch.cuda.memory_reserved(device) == reserved
    assert memory.trial(config, size, device, 0.4e9) < 0.36e9 and memory.trial(config, 256, device, 0.4e9) is None


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
        return Memory(*[0] * 7, peak=10**9 * config.batch_size), None

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


def test_the_micro_batch_that_auto_found_is_explained(config, in_process, run_main, monkeypatch):
    def train_step(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(train, "train_step", train_step)
    replace_traces(monkeypatch)
    tried = replace_trials(monkeypatch, 4, lambda size: 10**9 * size)
    given = vars(config) | {"memory_gb": 6.0, "batch_size": 12, "micro_batch_size": "auto"}
    result = run_main(train.main, *flags(**given))
    assert result.code == 3 and tried == [4]
    assert "predicted to take 4.000 GB, of 6.000 GB available on cpu" in result.err
    assert "--micro_batch_size=3       3.000 GB  the first that fits" in result.err


@pytest.mark.slow
def test_a_config_that_is_not_resolved_yet_is_explained_by_a_child(config, monkeypatch, tmp_path):
    """The vocabulary comes from the dataset; auto counts as 1. A train.py in the working directory is not imported."""
    (tmp_path / "train.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    unresolved = replace(config, micro_batch_size="auto", vocab_size=0, attention="matmul")
    text = "\n".join(explained(unresolved, available=1e6))
    one = replace(config, micro_batch_size=1, vocab_size=vocabulary(config), attention="matmul")
    assert f"A step is predicted to take {memory.gb(predict.predict_memory(one).peak)}, of 0.001 GB" in text
    assert "--attention=sdpa" in text and "No single change is enough" in text


def vocabulary(config):
    return json.loads(Path(config.dataset, "meta.json").read_text())["vocab_size"]


def test_a_gpu_that_others_have_filled_is_named_in_one_line(config, monkeypatch, capsys):
    def full(*_):
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(machine, "free_memory", full)
    memory.explain(config, torch.device("cuda", 0), 0, MemoryError())
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
    monkeypatch.setattr(machine, "free_memory", lambda _: 8 * peak)
    memory.warn_if_too_large(with_vocabulary(config), CPU)


def test_without_a_prediction_nothing_is_warned_of(config, monkeypatch, capsys):
    monkeypatch.setattr(memory, "ask", lambda *_: {})
    memory.warn_if_too_large(replace(with_vocabulary(config), memory_gb=1e-3), CPU)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words",
    [[], ["config/gpt2.py", "--stage=naive"], ["config/gpt2.py", "--checkpointing=every:1", "--micro_batch_size=1"]],
)
def test_the_estimate_is_below_the_prediction_by_less_than_the_quarter_that_asks_for_one(words):
    config = load_config([*words, "--vocab_size=50257", "--n_layer=2"])
    assert 1 < predict.predict_memory(config).peak / memory.estimate_peak(config, 1) < 4


def test_activations_of_a_block_follow_the_paper():
    keys = {"context_length": 128, "n_embd": 128, "n_head": 4, "batch_size": 8, "compile": False}
    config = load_config([f"--{key}={value}" for key, value in keys.items()])
    config = replace(config, dtype="bfloat16", dropout=0.1, attention="matmul")
    s, b, h, a = config.context_length, config.batch_size, config.n_embd, config.n_head
    assert memory.block_activations(config) == s * b * h * (34 + 5 * a * s / h)
    assert memory.block_activations(replace(config, dtype="float32")) == s * b * h * (66 + 9 * a * s / h)
    linear = memory.block_activations(replace(config, dropout=0.0, attention="sdpa", context_length=300))
    blocks = memory.block_activations(replace(config, dropout=0.0, attention="blocks", context_length=300))
    assert blocks - linear == 2 * b * a * (128 * 128 + 128 * 256 + 44 * 300)


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


def test_a_model_that_is_released_takes_no_memory(config):
    model, optimizer = build(with_vocabulary(config))
    batch = Batch(*torch.randint(17, (2, 2, 128)).unbind())
    train.train_step(model, optimizer, batch, 1e-3, config)
    memory.release(model, optimizer)
    assert all(parameter.untyped_storage().nbytes() == 0 and parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state
