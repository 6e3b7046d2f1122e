"""Starts the processes that measure, and returns their results.

A measurement is a function, called in a separate process (run_alone) or in several that find one another, as
torchrun starts them (run_together). One that takes a `turn` lives on: it hands over figures, and waits until it is
asked again (Processes). PyTorch's start_processes starts them. On Linux they are forks of multiprocessing's fork
server, which has imported torch and the compiler: importing them anew takes each process 8 s. A fork is as good as a
new process as long as the server holds only fork-safe state: no CUDA context, no parallel region, no compiler threads.
So the server computes nothing, and PYTORCH_NVML_BASED_CUDA_CHECK=1 lets the compiler ask for a GPU without CUDA.

The code of another folder takes the command line of measurements.py (Command).
"""

import contextlib
import functools
import json
import math
import multiprocessing.connection
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from torch.distributed import TCPStore
from torch.multiprocessing import start_processes

from nanoladder import parallel
from nanoladder.data import full_shared_memory
from nanoladder.data.batches import end_workers
from nanoladder.errors import BadInput
from nanoladder.machine import is_out_of_memory

DISTRIBUTED = [f"torch.distributed.{name}" for name in ("fsdp", "tensor.parallel", "pipelining")]
PRELOADED = ["torch._inductor.compile_fx", *DISTRIBUTED, "lab.measure.measurements"]  # seconds of imports
OUTPUTS = "stdout", "stderr"  # files of run_together
KILLED = "killed by the system, most likely out of memory"
EXITED = "exit code 0"
GRACE = 30  # seconds that a process has to exit


def run_alone(function: Callable, *args: Any, **options: Any) -> Any:
    """Calls a function in a separate process. Returns its result, or raises as run_together does."""
    return run_together(function, *args, n=1, **options)[0]


def run_together(function, *args, n, seconds=math.inf, **options):
    """Calls function(*args, **options) in each of n processes of one group. Returns their results, by rank.

    Raises BadInput or RuntimeError, with the reason, once one fails, and TimeoutError if they run for longer than
    `seconds`. More options are those of Processes.
    """
    with Processes(function, *args, n=n, **options) as processes:
        return processes.answers(seconds)


class Processes:
    """n separate processes of one group, each of which calls function(*args, **options). A context that ends them.

    With live=True the function also gets turn(figures), which hands over figures, waits, and returns the next request,
    or None at the end. A folder keeps what they print, in OUTPUTS.
    """

    def __init__(self, function, *args, n=1, folder=None, live=False, **options):
        streams = [Path(folder, name) if folder else Path(os.devnull) for name in OUTPUTS]
        environment = {}
        for path in streams if folder else ():
            path.write_bytes(b"")
        if n > 1:
            self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun keeps one
            environment = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "OMP_NUM_THREADS": 1, "MASTER_ADDR": "localhost"}
            environment |= {"MASTER_PORT": self.store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        self.pipes, remote = zip(*(context().Pipe() for _ in range(n)), strict=True)
        given = remote, streams, environment, live, function, args, options
        self.group = start_processes(work, given, n, join=False, start_method=context().get_start_method())
        for connection in remote:
            connection.close()

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        if not error:
            for process in self.group.processes:
                process.join(GRACE)
        self.kill()

    def kill(self):
        """Ends the processes at once."""
        for process in self.group.processes:
            process.kill()
            process.join()

    def answers(self, seconds=math.inf):
        """Returns the next answer of each process, handed over or returned, by rank. Raises as run_together does."""
        results, deadline = {}, time.monotonic() + seconds
        while waiting := [rank for rank in range(len(self.pipes)) if rank not in results]:
            ends = [self.pipes[rank] for rank in waiting] + [self.group.processes[rank].sentinel for rank in waiting]
            multiprocessing.connection.wait(ends, min(1.0, seconds))
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {seconds:.0f} s")
            for rank in waiting:
                process = self.group.processes[rank]
                if self.pipes[rank].poll():
                    results[rank] = received(self.pipes[rank], process)
                elif not process.is_alive():
                    results[rank] = None, ended(process)
            if failed := [error for _, error in results.values() if error and str(error) != EXITED]:
                raise failed[0]
        if failed := [error for _, error in results.values() if error]:
            raise failed[0]
        return [results[rank][0] for rank in range(len(self.pipes))]

    def answer(self):
        """What the first process hands over next."""
        return self.answers()[0]

    def ask(self, request):
        """Sends all a request. Returns what the first process answers."""
        for connection in self.pipes:
            with contextlib.suppress(OSError):  # it has ended: its answer says why
                connection.send(request)
        return self.answer()

    def end(self):
        """Ends the turns. Returns what the first process's function returns."""
        return self.ask(None)


def work(rank, connections, streams, environment, live, function, args, options):
    """Calls the function in this new process, the one of that rank, and sends its answer: (result, why it failed)."""
    for descriptor, path in enumerate([os.devnull, *streams]):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), descriptor)
    multiprocessing.set_start_method(None, force=True)  # the workers of a loader start as they do in training
    if environment:
        environment |= {"RANK": rank, "LOCAL_RANK": rank}
        os.environ |= {name: str(value) for name, value in environment.items()}
    if live:
        options["turn"] = functools.partial(turn, connections[rank])
    try:
        answer = function(*args, **options), None
        parallel.destroy_process_group()
    except Exception as error:  # its frames, and so the loaders that they hold, end here
        answer = None, (BadInput if isinstance(error, BadInput) else RuntimeError)(reason(error))
    if answer[1]:  # before the answer, after which this process is killed, and its workers would live on for seconds
        end_workers()  # an error that a worker raised holds its loader
    connections[rank].send(answer)
    if answer[1]:
        sys.exit(1)


def turn(connection, figures):
    """Hands figures over, and waits. Returns the next request; None at the end, and if nobody is there any more."""
    connection.send((figures, None))
    try:
        return connection.recv()
    except EOFError:
        return None


def received(connection, process):
    """The answer that a process sends, or the reason why it ended while it did."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None, ended(process)


def ended(process):
    """The reason why a process ended without an answer."""
    process.join()  # exit code 255: its server was killed
    return RuntimeError(KILLED if process.exitcode in (-9, 255) else f"exit code {process.exitcode}")


@functools.cache
def context():
    """Returns the context of new processes. The fork server keeps this process's environment as of the first start."""
    if sys.platform != "linux":  # on macOS, its libraries do not survive a fork
        return multiprocessing.get_context("spawn")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server


def reason(error):
    """Returns the reason why a measurement failed, in one line."""
    if is_out_of_memory(error):
        return "out of memory"
    if full := full_shared_memory(error):
        return full
    error = getattr(error, "inner_exception", error)  # of torch.compile's errors
    name = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
    return name + str(error).strip().partition("\n")[0]


class Command:
    """A process of a measurement of the code in another folder, `root`, that lives as Processes do.

    It is not forked: all forks of a server share its memory layout, which may be a lucky one.
    """

    def __init__(self, measurement, words, root):
        command = [sys.executable, "-m", "lab.measure.measurements", measurement, *words]
        environment = os.environ | {"PYTHONPATH": str(root)}
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 the context closes it
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, text=True, cwd=root, env=environment, **streams)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        self.errors.close()

    def answer(self):
        """What it hands over next, or returns. Raises RuntimeError, with the reason, if it fails."""
        if line := self.process.stdout.readline():
            return json.loads(line)
        code = self.process.wait()
        self.errors.seek(0)
        raise RuntimeError(reason_of_exit(subprocess.CompletedProcess([], code, stderr=self.errors.read())))

    def ask(self, request):
        """Sends a request. Returns what it answers."""
        with contextlib.suppress(OSError):  # it has ended: its answer says why
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()

    def end(self):
        """Ends the turns. Returns what its function returns."""
        return self.ask(None)


def reason_of_exit(process: CompletedProcess) -> str:
    """Returns the reason why a process of subprocess.run, its stderr captured as text, failed, in one line."""
    last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    return KILLED if process.returncode == -9 else last.removeprefix("error: ")
