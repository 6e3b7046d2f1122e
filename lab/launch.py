"""Starts the processes that measure, and returns what they find.

A measurement is a function, called in a separate process (run_alone) or in several that find one another, as
torchrun starts them (run_together). On Linux that is a fork of multiprocessing's fork server, which has imported torch
and the compiler. A fork is as good as a new process as long as the server holds only fork-safe state: no CUDA context,
no parallel region, no compiler threads. So the server computes nothing, and PYTORCH_NVML_BASED_CUDA_CHECK=1 lets the
compiler ask for a GPU without CUDA.

The code of another folder takes the command line of measure.py (run_command).
"""

import contextlib
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

from torch.distributed import TCPStore

from nanoladder import parallel
from nanoladder.errors import BadInput
from nanoladder.machine import is_out_of_memory

DISTRIBUTED = [f"torch.distributed.{name}" for name in ("fsdp", "tensor.parallel", "pipelining")]
PRELOADED = ["torch._inductor.compile_fx", *DISTRIBUTED, "lab.measure"]  # seconds of imports
OUTPUTS = "stdout", "stderr"  # files of run_together
ENDING = 30  # seconds that a process has to end by itself, with the workers of its loader
KILLED = "killed by the system, most likely out of memory"


def run_alone(function, *args, **options):
    """Calls a function in a separate process. Returns its result, or raises as Child.result does."""
    child = Child(function, *args, **options)
    try:
        return child.result()
    finally:
        child.end()


class Child:
    """A process that calls function(*args, **options)."""

    def __init__(self, function, *args, **options):
        self.connection, theirs = context().Pipe()
        self.process = context().Process(target=answer, args=(theirs, function, args, options))
        self.process.start()
        self.busy = True
        theirs.close()

    def result(self):
        """Returns the function's result. Raises BadInput or RuntimeError, with the reason, if it failed."""
        wait(self.handles())
        self.busy = False
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():  # else it has ended, but the workers of its loader have not yet
                result, error = self.connection.recv()
                if error:
                    raise error
                return result
        self.process.join()
        code = self.process.exitcode  # 255: its server was killed
        raise RuntimeError(KILLED if code in (-9, 255) else f"exit code {code}")

    def handles(self):
        """Objects for multiprocessing.connection.wait: one is ready once the process has answered or ended."""
        return [self.connection, self.process.sentinel]

    def end(self):
        """Lets the process end by itself, with the workers of its loader; kills it if it is busy."""
        self.connection.close()
        self.process.join(0 if self.busy else ENDING)
        self.process.kill()
        self.process.join()


@functools.cache
def context():
    """The way in which processes start. The fork server keeps this process's environment as of the first start."""
    if sys.platform != "linux":  # on macOS, its libraries do not survive a fork
        return multiprocessing.get_context("spawn")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server


def answer(connection, function, args, options):
    """Calls the function in this new process, and sends (its result, None) or (None, why it failed)."""
    for descriptor in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    multiprocessing.set_start_method(None, force=True)  # the workers of a loader start as they do in training
    try:
        found = function(*args, **options), None
    except Exception as error:
        found = None, (BadInput if isinstance(error, BadInput) else RuntimeError)(reason(error))
    with contextlib.suppress(BrokenPipeError):  # nobody asks any more
        connection.send(found)


def reason(error):
    """Says in one line why a measurement failed."""
    if is_out_of_memory(error):
        return "out of memory"
    error = getattr(error, "inner_exception", error)  # of torch.compile's errors
    name = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
    return name + str(error).strip().partition("\n")[0]


def run_together(function, *args, n, folder, seconds=3600, **options):
    """Calls function(*args, **options) in each of n processes of one group. Returns their results.

    The folder keeps what they print. Once one fails, ends the others and raises as Child.result does. Raises
    TimeoutError if they run for longer than `seconds`.
    """
    for name in OUTPUTS:
        Path(folder, name).write_bytes(b"")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun keeps one
    children = [Child(join, rank, n, store.port, folder, function, args, options) for rank in range(n)]
    results, deadline = {}, time.monotonic() + seconds
    try:
        while waiting := {handle: child for child in children if child not in results for handle in child.handles()}:
            ready = wait(waiting, deadline - time.monotonic())
            if not ready:
                raise TimeoutError(f"no answer within {seconds:.0f} s")
            results |= {child: child.result() for child in {waiting[handle] for handle in ready}}
    finally:
        for child in children:
            child.end()
    return [results[child] for child in children]


def join(rank, n, port, folder, function, args, options):
    """Calls the function in this new process, which becomes the one of that rank."""
    for name in OUTPUTS:
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_APPEND), getattr(sys, name).fileno())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "OMP_NUM_THREADS": 1}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ |= {name: str(value) for name, value in variables.items()}
    result = function(*args, **options)
    parallel.stop()
    return result


def run_command(measurement, words, root):
    """Takes a measurement of the code in another folder, `root`, by `python -m lab.measure`.

    This process is not forked: all forks of a server share its memory layout, which may be a lucky one. Raises
    RuntimeError with the reason if it fails.
    """
    command, environment = [sys.executable, "-m", "lab.measure", measurement, *words], {"PYTHONPATH": str(root)}
    process = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ | environment)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    raise RuntimeError(reason_of_exit(process))


def reason_of_exit(process):
    """Says in one line why a process of subprocess.run, whose stderr was captured as text, failed."""
    last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    return KILLED if process.returncode == -9 else last.removeprefix("error: ")
