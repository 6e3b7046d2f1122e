"""Starts the processes that measure, and returns what they find.

A measurement is a function, called in a process of its own (run_alone, Child) or in several that find one another, as
torchrun starts them (run_together). On Linux that is a fork of multiprocessing's fork server, which has imported torch
and the compiler. A fork is as good as a new process as long as the server has nothing that does not survive a fork: no
CUDA context, no parallel region, no threads of the compiler. So the server computes nothing;
PYTORCH_NVML_BASED_CUDA_CHECK=1 lets the compiler ask for a GPU without CUDA.

The code of another folder takes the command line of measure.py (run_command).
"""

import contextlib
import functools
import inspect
import json
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch.multiprocessing
from torch.distributed import TCPStore
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from nanoladder import parallel
from nanoladder.errors import BadInput
from nanoladder.machine import is_out_of_memory

DISTRIBUTED = [f"torch.distributed.{name}" for name in ("fsdp", "tensor.parallel", "pipelining")]
PRELOADED = ["torch._inductor.compile_fx", *DISTRIBUTED, "lab.measure"]  # seconds of imports
OUTPUTS = "stdout", "stderr"  # files of run_together
ENDING = 30  # seconds that a process has to end by itself, with the workers of its loader
KILLED = "killed by the system, most likely out of memory"


class TimeUp(Exception):
    """A process has not answered in time."""


def run_alone(function, *args, **options):
    """Calls a function in a process of its own. Returns its result, or raises RuntimeError with the reason."""
    child = Child(function, *args, **options)
    try:
        figures = child.receive()
    except BaseException:  # Ctrl-C, too
        child.end(grace=0)
        raise
    child.end()
    return figures


class Child:
    """A process that calls function(*args, **options), which returns its figures, or yields some whenever asked."""

    def __init__(self, function, *args, **options):
        self.connection, theirs = context().Pipe()
        self.process = context().Process(target=answer, args=(theirs, function, args, options))
        self.process.start()
        theirs.close()

    def receive(self, limit=None):
        """The next figures. Raises RuntimeError with the reason if there are none, TimeUp after `limit` seconds."""
        ready = wait([self.connection, self.process.sentinel], None if limit is None else max(0.0, limit))
        if not ready:
            self.end(grace=0)
            raise TimeUp
        failure = None
        with contextlib.suppress(EOFError, OSError):
            if self.connection in ready:  # else it has ended, but the workers of its loader have not yet
                figures, failure = self.connection.recv()
                if not failure:
                    return figures
        self.end()
        code = self.process.exitcode  # 255: its server was killed
        raise RuntimeError(failure or (KILLED if code in (-9, 255) else f"exit code {code}"))

    def ask(self, limit=None):
        """Figures that are measured now, as receive()."""
        with contextlib.suppress(OSError):  # it has ended, as receive() says
            self.connection.send(None)
        return self.receive(limit)

    def end(self, grace=ENDING):
        """Ends the process, which ends by itself unless it measures; after so many seconds it is killed."""
        self.connection.close()
        self.process.join(grace)
        self.process.kill()
        self.process.join()


@functools.cache
def context():
    """The way in which processes start. The fork server keeps this process's environment of the first start."""
    if sys.platform != "linux":  # on macOS, its libraries do not survive a fork
        return multiprocessing.get_context("spawn")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server


def answer(connection, function, args, options):
    """Calls the function in this new process, and sends (figures, None) or (None, the reason why it failed)."""
    for descriptor in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    multiprocessing.set_start_method(None, force=True)  # the workers of a loader start as they do in training
    with contextlib.suppress(EOFError, BrokenPipeError):  # nobody asks any more
        try:
            result = function(*args, **options)
            for figures in result if inspect.isgenerator(result) else [result]:
                connection.send((figures, None))
                connection.recv()
        except EOFError:
            raise
        except Exception as error:
            connection.send((None, reason(error)))


def reason(error):
    """The line that says why a measurement failed."""
    if is_out_of_memory(error):
        return "out of memory"
    error = getattr(error, "inner_exception", error)  # of torch.compile's errors
    name = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
    return name + str(error).strip().partition("\n")[0]


def run_together(function, *args, n, folder, seconds=3600, **options):
    """Calls function(*args, **options) in each of n processes of one group. Returns their results, which are JSON.

    The folder keeps what they print. Once one fails, ends the others and raises BadInput if that was the reason, else
    RuntimeError with the reason. Raises TimeUp if they run for longer than so many seconds.
    """
    for name in OUTPUTS:
        Path(folder, name).write_bytes(b"")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun keeps one
    given, start_method = (n, store.port, folder, function, args, options), context().get_start_method()
    processes = torch.multiprocessing.start_processes(join, given, n, join=False, start_method=start_method)
    deadline = time.monotonic() + seconds
    try:
        while not processes.join(max(0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                raise TimeUp(f"{n} processes still run after {seconds} s")
    except ProcessExitedException as error:
        raise RuntimeError(KILLED if error.exit_code == -9 else f"exit code {error.exit_code}") from error
    except ProcessRaisedException as error:
        kind, _, text = str(error).strip().splitlines()[-1].partition(": ")  # as join() raises it
        raise (BadInput if kind.endswith("BadInput") else RuntimeError)(text) from error
    finally:
        for process in processes.processes:
            process.kill()
    return [json.loads(result_file(folder, rank).read_text()) for rank in range(n)]


def result_file(folder, rank):
    return Path(folder, f"result{rank}.json")


def join(rank, n, port, folder, function, args, options):
    """Calls the function in this new process, which becomes the one of that rank."""
    for name in OUTPUTS:
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_APPEND), getattr(sys, name).fileno())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "OMP_NUM_THREADS": 1}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ |= {name: str(value) for name, value in variables.items()}
    multiprocessing.set_start_method(None, force=True)
    try:
        result = function(*args, **options)
    except BadInput:
        raise
    except Exception as error:
        raise RuntimeError(reason(error)) from error
    parallel.stop()
    result_file(folder, rank).write_text(json.dumps(result))


def run_command(measurement, words, root):
    """Takes a measurement of the code in another folder, `root`, by `python -m lab.measure`.

    Such a process is no fork: all forks of a server have its memory layout, which may be a lucky one. Raises
    RuntimeError with the reason if it fails.
    """
    command, environment = [sys.executable, "-m", "lab.measure", measurement, *words], {"PYTHONPATH": str(root)}
    process = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ | environment)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    raise RuntimeError(KILLED if process.returncode == -9 else last.removeprefix("error: "))
