"""Starts the processes that measure, and returns what they find.

A measurement is a function of measure.py, called in a process of its own. On Linux that is a fork of multiprocessing's
fork server, which has imported torch and the compiler. A fork is as good as a new process as long as the server has
nothing that does not survive a fork: no CUDA context, no parallel region, no threads of the compiler. So the server
computes nothing; PYTORCH_NVML_BASED_CUDA_CHECK=1 lets the compiler ask for a GPU without CUDA.

Several processes at once, and the code of another folder, take the command line of measure.py (run_command).
"""

import contextlib
import functools
import inspect
import json
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import wait

from nanoladder.errors import BadInput
from nanoladder.machine import is_out_of_memory
from nanoladder.run.memory import child_environment

PRELOADED = ["torch._inductor.compile_fx", "lab.measure"]  # a second of imports, and more of the compiler's with it
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


def run_command(measurement, words, processes=1, root=None, **options):
    """Takes a measurement, with its options, by `python -m lab.measure`, in one process or as torchrun starts several.

    root: the folder whose code is measured, if not this one. Such a process is no fork: all forks of a server have its
    memory layout, which may be a lucky one. Raises RuntimeError with the reason if it fails.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = ["-m", "lab.measure", measurement, json.dumps(options), *words]
    command = [sys.executable, *(torchrun if processes > 1 else []), *command]
    environment = os.environ | {"PYTHONPATH": str(root)} if root else child_environment()
    process = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    if process.returncode == -9 or "exitcode  : -9" in process.stderr:
        raise RuntimeError(KILLED)
    lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
    raise RuntimeError(next((line for line in lines if line.startswith("error: ")), lines[-1]).removeprefix("error: "))
