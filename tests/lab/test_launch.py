"""Processes that measure are as good as new ones, run side by side, and say why they fail."""

import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
from multiprocessing import forkserver

import pytest
import torch
from conftest import ROOT, flags

from lab import launch

pytestmark = pytest.mark.slow
CODE = "import os, sys, torch\nfrom nanoladder.errors import BadInput\n\n\ndef main(argv):\n    exec(argv[0])\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*codes): the ends of processes that run these lines, all started at once."""
    (tmp_path / "planted.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)

    def finish(*codes):
        return [child.finish() for child in [launch.Child([code], "planted") for code in codes]]

    return finish


def test_output_exit_code_and_reason_of_each_process_come_back(run):
    printed, killed, raised, refused = run(
        "print(argv[0][:5], 'ü', sys.stdin.read() == ''); print('aside', file=sys.stderr); sys.exit(3)",
        "os.kill(os.getpid(), 9)",
        "1 / 0",
        "raise BadInput('no such row')",
    )
    assert (printed.returncode, printed.stdout, printed.stderr) == (3, "print ü True\n", "aside\n")
    assert launch.reason(killed) == "killed by the system, most likely out of memory"
    assert (raised.returncode, launch.reason(raised)) == (1, "ZeroDivisionError: division by zero")
    assert (refused.returncode, refused.stderr) == (2, "error: no such row\n")


def test_a_fork_has_the_compiler_and_its_server_has_neither_touched_cuda_nor_computed(run):
    [found] = run(
        "print('torch' in sys.modules, torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork(), "
        "round(float(torch.ones(10**6).exp().log().sum())))"  # hangs after a parallel region
    )
    assert found.stdout == f"True False {10**6}\n"


def test_the_workers_of_a_loader_start_as_in_training(run):
    [found] = run("import multiprocessing; print(multiprocessing.get_start_method())")
    assert found.stdout == f"{multiprocessing.get_context().get_start_method()}\n"


def test_processes_run_side_by_side_and_one_can_be_killed(dense):
    words = flags(dataset=dense)
    child = launch.Child(["time", *words, "--steps=1000000"])
    other = launch.Child(["turns", "--address=/nowhere", *words])
    assert launch.reason(other.finish()) == "FileNotFoundError: [Errno 2] No such file or directory"
    child.kill()
    assert child.finish().returncode == -9


@pytest.mark.nightly
def test_a_server_that_is_killed_is_out_of_memory_and_the_next_measurement_starts_another(dense):
    words = ["--device=cpu", f"--dataset={dense}"]
    child = launch.Child(["time", *flags(dataset=dense), "--steps=1000000"])
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    assert launch.reason(child.finish()) == "killed by the system, most likely out of memory"
    os.kill(child.process.pid, signal.SIGKILL)  # it outlives its server
    assert launch.run_alone("machine", words)["torch"] == torch.__version__


@pytest.mark.nightly
def test_a_fork_measures_what_a_new_process_measures(dense):
    words = flags(dataset=dense, n_embd=128, context_length=64, batch_size=16)
    new, forked = (take("examine", words) for take in (in_new_process, launch.run_alone))
    assert forked["losses"] == new["losses"]
    assert forked["memory"] == new["memory"]
    new, forked = (median_resident(take, words) for take in (in_new_process, launch.run_alone))
    assert forked == pytest.approx(new, rel=0.4)  # with the compiler, a new one takes 2.4 times as much


def median_resident(take, words):
    """As the tables do: a single process takes up to 10 % more or less than another."""
    return statistics.median(take("time", words)["resident_bytes"] for _ in range(3))


def in_new_process(what, words):
    command = [sys.executable, "-m", "lab.measure", what, *words]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
