"""Starts measurements (measure.py) in processes of their own, and reads what they print."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile

from nanoladder.run.memory import child_environment

MEASURE = "lab.measure"
FORKS = sys.platform == "linux"  # on macOS, its libraries do not survive a fork


def run_alone(measurement, words, processes=1, root=None, module=MEASURE):
    """Takes a measurement in a new process, or in several. Raises RuntimeError with the reason if it fails.

    root: the folder whose code is measured if it is not this one. Such a process is no fork: all forks of a server have
    its memory layout, which may be a lucky one, and two versions would have one each. module: takes the measurement.
    """
    if processes == 1 and root is None and FORKS:
        process = fork(module, [measurement, *words])
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, *launcher * (processes > 1), "-m", module, measurement, *words]
        environment = os.environ | {"PYTHONPATH": str(root)} if root else child_environment()
        process = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    raise RuntimeError(reason(process))


def start(argv):
    """Starts `python -m lab.measure argv` in a new process, which goes on by itself.

    Returns two functions: one kills it; the other waits for its end and returns the CompletedProcess, or raises
    ServerEnded.
    """
    if FORKS:
        server = start_fork_server()
        child = request([MEASURE, argv], server)

        def kill():
            with contextlib.suppress(ProcessLookupError):  # the server has ended, and left it to the system
                os.kill(child, signal.SIGKILL)

        return kill, lambda: finished(argv, child, server)
    err = tempfile.TemporaryFile("w+")  # noqa: SIM115 finish() closes it
    command, nothing = [sys.executable, "-m", MEASURE, *argv], subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=err, env=child_environment())

    def finish():
        process.wait()
        with err:
            err.seek(0)
            return subprocess.CompletedProcess(argv, process.returncode, "", err.read())

    return process.kill, finish


def reason(process):
    """The line in which a process says why it failed."""
    if process.returncode == -9 or "exitcode  : -9" in process.stderr:
        return "killed by the system, most likely out of memory"
    lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
    reasons = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception)\b", line)]
    return (reasons or lines)[-1]


def fork(module, argv):
    """Runs `python -m module argv` as a fork of the fork server, which lives as long as this process."""
    server = start_fork_server()
    return finished(argv, request([module, argv], server), server)


def finished(argv, child, server):
    """Waits for a fork. Returns its CompletedProcess. Raises ServerEnded."""
    return subprocess.CompletedProcess(argv, *request(child, server))


class ServerEnded(RuntimeError):
    """The fork server has ended, for this reason; the next call starts another."""


def request(line, server):
    """The fork server's answer to a request. Raises ServerEnded."""
    try:
        print(json.dumps(line), file=server.stdin, flush=True)
        return json.loads(server.stdout.readline())
    except (BrokenPipeError, ValueError):  # no answer, or none that can be read
        start_fork_server.cache_clear()
        with contextlib.suppress(BrokenPipeError):
            server.stdin.close()  # it ends with stdin
        process = subprocess.CompletedProcess(line, server.wait(), "", "error: the fork server has ended")
        raise ServerEnded(reason(process)) from None
    except BaseException:  # its answer is still to come: another call would read it
        start_fork_server.cache_clear()
        with contextlib.suppress(BrokenPipeError):
            server.stdin.close()
        raise


@functools.cache
def start_fork_server():
    """The fork server, started at the first call; it keeps this process's environment of that moment."""
    command = [sys.executable, "-m", "lab.forkserver"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment() | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
    )
