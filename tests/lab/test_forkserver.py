"""A fork of the fork server measures as a new process does, whatever becomes of it."""

import json
import statistics
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, flags

from lab import launch
from nanoladder.run.memory import child_environment

pytestmark = pytest.mark.slow
FOUND = "import os, sys, torch; from lab import forkserver; forkserver.measure.main = lambda argv: "
SERVE = "; forkserver.serve()"


@pytest.fixture
def answers():
    """answers(code, *requests): what a server answers whose forks call the code, an expression in argv."""

    def ask(code, *requests, **environment):
        visible = {} if torch.cuda.is_available() else {"CUDA_VISIBLE_DEVICES": ""}  # without a driver, no NVML
        environment = child_environment() | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"} | visible | environment
        command, pipe = [sys.executable, "-c", FOUND + code + SERVE], subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True) as server:

            def answer(request):
                print(json.dumps(request), file=server.stdin, flush=True)
                return json.loads(server.stdout.readline())

            forks = [answer(["lab.measure", request]) for request in requests]  # all at once
            found = [answer(fork) for fork in forks]
            assert server.communicate() == ("", "")
            return found

    return ask


def test_output_and_exit_code_of_each_fork_come_back(answers):
    code = "(print(*argv), print('to stderr', file=sys.stderr), sys.exit(len(argv)))"
    assert answers(code, [], ["a"], ["a", "ü\n"]) == [
        [0, "\n", "to stderr\n"],
        [1, "a\n", "to stderr\n"],
        [2, "a ü\n\n", "to stderr\n"],
    ]


def test_a_fork_that_is_killed_or_raises_does_not_end_the_server(answers):
    killed, raised, refused, last = answers(
        "os.kill(os.getpid(), 9) if argv == ['kill'] else exec(argv[0])",
        ["kill"],
        ["1 / 0"],
        ["raise forkserver.measure.BadInput('no such row')"],
        ["print(sys.stdin.read() == '')"],
    )
    assert killed == [-9, "", ""]
    assert raised[0] == 1 and raised[2].endswith("ZeroDivisionError: division by zero\n")
    assert refused == [2, "", "error: no such row\n"]
    assert last == [0, "True\n", ""]


def test_the_server_has_the_compiler_but_has_neither_touched_cuda_nor_computed(answers):
    asked = {
        "imported": "'torch._inductor.compile_fx' in sys.modules",
        "CUDA": "torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()",
        "computed": "round(float(torch.ones(10**6).exp().log().sum()))",  # hangs after a parallel region
    }
    [[code, out, _]] = answers(f"print([{', '.join(asked.values())}])", [], OMP_NUM_THREADS="2")
    assert (code, out) == (0, f"[True, False, {10**6}]\n")


def test_a_fork_whose_parent_has_touched_cuda_starts_as_a_new_process(answers):
    code = "1 / 0; torch.cuda._is_in_bad_fork = lambda: True"
    [[code, out, err]] = answers(code, ["machine", "--device=cpu"])
    assert (code, err) == (0, "")
    assert json.loads(out)["torch"] == torch.__version__


def test_a_server_that_is_killed_is_out_of_memory_and_the_next_measurement_starts_another(dense):
    words = ["--device=cpu", f"--dataset={dense}"]
    launch.start_fork_server().kill()
    with pytest.raises(RuntimeError, match="most likely out of memory"):
        launch.run_alone("machine", words)
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


def test_forks_run_side_by_side_and_one_can_be_killed(dense):
    words = flags(dataset=dense)
    kill, finish = launch.start(["time", *words, "--steps=1000000"])
    _, finish_other = launch.start(["turns", "--address=/nowhere", *words])
    assert launch.reason(finish_other()) == "FileNotFoundError: [Errno 2] No such file or directory"
    kill()
    assert finish().returncode == -9
    kill, finish = launch.start(["time", *words, "--steps=1000000"])
    launch.start_fork_server().kill()
    kill()
    with pytest.raises(launch.ServerEnded, match="killed by the system"):
        finish()
