"""Starts measurements (measure.py) in processes of their own, and reads what they print.

On Linux they are forks of multiprocessing's fork server, which has imported torch and the compiler. A fork is as good
as a new process as long as the server has nothing that does not survive a fork: no CUDA context, no parallel region, no
threads of the compiler. So the server computes nothing. Importing the compiler asks if there is a GPU:
PYTORCH_NVML_BASED_CUDA_CHECK=1 lets PyTorch answer without CUDA. Where that is not enough, the fork replaces itself by
a new process.
"""

import functools
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from nanoladder.entry import run_script

import torch

from nanoladder.run.memory import child_environment

MEASURE = "lab.measure"
PRELOADED = ["torch._inductor.compile_fx", MEASURE]  # a second of imports, and more of the compiler's with it
FORKS = sys.platform == "linux"  # on macOS, its libraries do not survive a fork


def run_alone(measurement, words, processes=1, root=None, module=MEASURE):
    """Takes a measurement in a new process, or in several. Raises RuntimeError with the reason if it fails.

    root: the folder whose code is measured if it is not this one. Such a process is no fork: all forks of a server have
    its memory layout, which may be a lucky one, and two versions would have one each. module: takes the measurement.
    """
    if processes == 1 and root is None:
        process = Child([measurement, *words], module).finish()
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, *launcher * (processes > 1), "-m", module, measurement, *words]
        environment = os.environ | {"PYTHONPATH": str(root)} if root else child_environment()
        process = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    raise RuntimeError(reason(process))


def reason(process):
    """The line in which a process says why it failed."""
    if process.returncode in (-9, 255) or "exitcode  : -9" in process.stderr:  # 255: its server was killed
        return "killed by the system, most likely out of memory"
    lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
    reasons = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception)\b", line)]
    return (reasons or lines)[-1]


class Child:
    """`python -m module argv` in a process that goes on by itself."""

    def __init__(self, argv, module=MEASURE):
        self.argv = argv
        self.out, self.err = (tempfile.NamedTemporaryFile("r") for _ in range(2))  # noqa: SIM115 finish() closes them
        self.process = context().Process(target=become, args=(module, argv, self.out.name, self.err.name))
        try:
            self.process.start()
        except ConnectionRefusedError:  # the fork server was killed, and is not gone yet
            time.sleep(1)
            self.process.start()

    def kill(self):
        self.process.kill()

    def finish(self):
        """Waits for the end. Returns the CompletedProcess. Kills the process if waiting is interrupted."""
        try:
            self.process.join()
        except BaseException:
            self.kill()
            raise
        with self.out, self.err:
            return subprocess.CompletedProcess(self.argv, self.process.exitcode, self.out.read(), self.err.read())


@functools.cache
def context():
    """The way in which processes start. The fork server keeps this process's environment of the first start."""
    if not FORKS:
        return multiprocessing.get_context("spawn")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server


def become(module, argv, out, err):
    """Turns a new process into `python -m module argv`, its output into two files."""
    for path, descriptor in ((os.devnull, 0), (out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_RDWR), descriptor)
    multiprocessing.set_start_method(None, force=True)  # the workers of a loader start as they do in training
    if torch.cuda._is_in_bad_fork():
        os.execve(sys.executable, [sys.executable, "-m", module, *argv], child_environment())
    sys.argv = [module, *argv]
    run_script(importlib.import_module(module).main)
