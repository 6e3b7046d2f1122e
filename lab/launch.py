"""Starts measurements (measure.py) in processes of their own, and reads what they print."""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys

from nanoladder.run.memory import child_environment


def run_alone(measurement, words, processes=1, root=None):
    """Takes a measurement in a new process, or in several. Raises RuntimeError with the reason if it fails.

    root: the folder whose code is measured if it is not this one. Such a process is no fork: all forks of a server have
    its memory layout, which may be a lucky one, and two versions would have one each.
    """
    if processes == 1 and root is None and sys.platform == "linux":  # on macOS, its libraries do not survive a fork
        process = fork([measurement, *words])
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, *launcher * (processes > 1), "-m", "lab.measure", measurement, *words]
        environment = os.environ | {"PYTHONPATH": str(root)} if root else child_environment()
        process = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    if process.returncode == -9 or "exitcode  : -9" in process.stderr:
        raise RuntimeError("killed by the system, most likely out of memory")
    lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
    reasons = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception)\b", line)]
    raise RuntimeError((reasons or lines)[-1])


def fork(argv):
    """Runs `python -m lab.measure argv` as a fork of the fork server, which lives as long as this process."""
    server = start_fork_server()
    try:
        print(json.dumps(argv), file=server.stdin, flush=True)
        return subprocess.CompletedProcess(argv, *json.loads(server.stdout.readline()))
    except (BrokenPipeError, ValueError):  # no answer, or none that can be read
        start_fork_server.cache_clear()
        with contextlib.suppress(BrokenPipeError):
            server.stdin.close()  # it ends with stdin
        return subprocess.CompletedProcess(argv, server.wait(), "", "error: the fork server has ended")
    except BaseException:  # its answer is still to come: another call would read it
        start_fork_server.cache_clear()
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
