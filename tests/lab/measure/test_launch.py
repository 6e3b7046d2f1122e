"""Measuring processes behave like new ones, run side by side, and report why they fail."""

import time
from pathlib import Path

import pytest
from conftest import ROOT, flags, replace, tiny

from lab.measure import launch, measurements
from nanoladder.errors import BadInput

pytestmark = pytest.mark.slow
CODE = """
import multiprocessing, os, sys, torch
from nanoladder.errors import BadInput

def given(*args, **options):
    print("to nobody")
    return args, options, sys.stdin.read()

def add(number, turn):
    while more := turn(number):
        number += more
    return number

def killed():
    os.kill(os.getpid(), 9)

def divide():
    return 1 / 0

def refused():
    raise BadInput("no such row")

def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

def ended():
    os._exit(3)

def fail_in_a_step(config, path):
    import train
    from lab.measure import measurements

    def train_step(*_):
        path.write_text(" ".join(str(process.pid) for process in multiprocessing.active_children()))
        return None()

    train.train_step = train_step
    measurements.time_steps(config)

def fork():
    touched = torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()
    computed = round(float(torch.ones(10**6).exp().log().sum()))  # hangs after a parallel region
    return touched, computed, multiprocessing.get_start_method()
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A module of functions for processes to call."""
    (tmp_path / "planted.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    import planted

    return planted


def test_a_process_returns_its_figures_or_the_reason_why_there_are_none(planted):
    assert launch.run_alone(planted.given, 1, b=2) == ((1,), {"b": 2}, "")
    with pytest.raises(BadInput, match=r"^no such row$"):
        launch.run_alone(planted.refused)
    for function, reason in {
        planted.killed: "killed by the system, most likely out of memory",
        planted.divide: "ZeroDivisionError: division by zero",
        planted.out_of_memory: "^out of memory$",
        planted.ended: "exit code 3",
    }.items():
        with pytest.raises(RuntimeError, match=reason):
            launch.run_alone(function)


def test_processes_live_from_turn_to_turn(planted, dense, tmp_path):
    with launch.Processes(planted.add, 1, n=2, live=True) as processes:
        assert [processes.answer(), processes.ask(5), processes.ask(7)] == [1, 6, 13]
        with pytest.raises(RuntimeError, match="TypeError"):
            processes.ask("no number")
    with launch.Processes(planted.add, 1, live=True) as one, launch.Processes(planted.add, 10, live=True) as other:
        assert [one.answer(), other.answer(), one.ask(1), other.ask(1), one.end()] == [1, 10, 2, 11, 2]
    with launch.Processes(planted.add, 1, live=True) as processes:
        processes.answer()
        processes.kill()
        with pytest.raises(RuntimeError, match="killed by the system"):
            processes.ask(1)
    config = measurements.load_config(flags(dataset=dense, num_workers=2))
    with launch.Processes(measurements.time_steps, config, live=True) as processes:
        found = [processes.answer(), processes.ask(0.01), processes.ask(0.02), processes.end()]
    assert all(each["seconds"] > 0 for each in found) and found[-1]["seconds"] == found[-2]["seconds"]
    with launch.Command("time", flags(dataset=dense), ROOT) as process:
        found = [process.answer(), process.ask(0.01), process.end()]
    assert all(each["seconds"] > 0 for each in found) and found[-1]["tokens"] == 64
    command = launch.Command("time", flags(dataset=tmp_path), ROOT)
    with command as process, pytest.raises(RuntimeError, match=r"no train\.bin"):
        process.answer()


def test_processes_that_do_not_answer_in_time_are_ended(tmp_path):
    with pytest.raises(TimeoutError, match="no answer within 1 s"):
        launch.run_together(time.sleep, 3600, n=2, folder=tmp_path, seconds=1)


def test_a_fork_is_as_good_as_a_new_process(planted):
    """Its server has neither touched CUDA nor computed; the workers of its loader start as in training."""
    import multiprocessing

    assert launch.run_alone(planted.fork) == (False, 10**6, multiprocessing.get_context().get_start_method())


def test_measurements_of_one_process_and_of_two(dense, tmp_path):
    config = measurements.load_config(flags(dataset=dense))
    profiled = launch.run_alone(measurements.profile_step, config)
    memory, parameters = profiled["memory"], profiled["parameters"]
    assert memory["weights"] >= memory["gradients"] == 4 * parameters
    held = memory["weights"] + memory["gradients"] + memory["optimizer"]
    assert held < memory["peak"] < held + 4_000_000
    assert 0 < sum(profiled["seconds_by_kind"].values()) < profiled["profiled_seconds"]

    curve = launch.run_alone(measurements.curve, replace(config, max_steps=60))
    assert max(curve["val_loss"], curve["loss"]) < profiled["losses"][0] and curve["tokens"] == 60 * 64

    timed = launch.run_alone(measurements.time_steps, config, threads=1)
    assert min(timed["seconds"], timed["first_step_seconds"]) > 0 and timed["tokens"] == 64
    assert 0 < timed["resident_bytes"] < 1e9

    ddp = replace(config, ddp=True)
    exchanged, _ = launch.run_together(measurements.exchange, ddp, n=2, folder=tmp_path, threads=1)
    assert exchanged["sent"]["all_reduce"][1] == pytest.approx(4 * parameters, abs=100)  # and two scalars
    assert exchanged["peak"] > 16 * parameters


def test_a_step_that_fails_ends_the_processes_of_the_loader_too(dense, planted, tmp_path):
    """They outlive signals for minutes, and would compute beside the next measurement."""
    with pytest.raises(RuntimeError, match="TypeError: 'NoneType' object is not callable"):
        launch.run_alone(planted.fail_in_a_step, tiny(dataset=str(dense), num_workers=2), tmp_path / "workers")
    workers = (tmp_path / "workers").read_text().split()
    assert len(workers) == 2 and not any(Path("/proc", worker).exists() for worker in workers)
