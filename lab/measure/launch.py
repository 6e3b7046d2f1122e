"""Starts the processes that measure, and returns what they find.

A measurement is a function, called in a separate process (run_alone) or in several that find one another, as
torchrun starts them (run_together). PyTorch's start_processes starts them and, once one fails, ends the others. On
Linux they are forks of multiprocessing's fork server, which has imported torch and the compiler: importing them anew
takes each process 8 s. A fork is as good as a new process as long as the server holds only fork-safe state: no CUDA
context, no parallel region, no compiler threads. So the server computes nothing, and PYTORCH_NVML_BASED_CUDA_CHECK=1
lets the compiler ask for a GPU without CUDA.

The code of another folder takes the command line of measurements.py (run_command).
"""

import functools
import json
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torch.distributed import TCPStore
from torch.multiprocessing import ProcessExitedException, start_processes

from nanoladder import parallel
from nanoladder.data import full_shared_memory
from nanoladder.data.batches import end_workers
from nanoladder.errors import BadInput
from nanoladder.machine import is_out_of_memory

DISTRIBUTED = [f"torch.distributed.{name}" for name in ("fsdp", "tensor.parallel", "pipelining")]
PRELOADED = ["torch._inductor.compile_fx", *DISTRIBUTED, "lab.measure.measurements"]  # seconds of imports
OUTPUTS = "stdout", "stderr"  # files of run_together
KILLED = "killed by the system, most likely out of memory"


def run_alone(function, *args, **options):
    """Calls a function in a separate process. Returns its result, or raises as run_together does."""
    with tempfile.TemporaryDirectory() as folder:
        return run_together(function, *args, n=1, folder=folder, **options)[0]


def run_together(function, *args, n, folder, seconds=math.inf, **options):
    """Calls function(*args, **options) in each of n processes of one group. Returns their results, by rank.

    The folder keeps what they print. Raises BadInput or RuntimeError, with the reason, once one fails, and TimeoutError
    if they run for longer than `seconds`.
    """
    folder, deadline, environment = Path(folder), time.monotonic() + seconds, {}
    answers = [folder / f"{rank}.pickle" for rank in range(n)]
    for path in (*answers, *(folder / name for name in OUTPUTS)):
        path.write_bytes(b"")
    if n > 1:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun keeps one
        environment = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "OMP_NUM_THREADS": 1, "MASTER_ADDR": "localhost"}
        environment |= {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    given = folder, answers, environment, function, args, options
    group = start_processes(work, given, n, join=False, start_method=context().get_start_method())
    try:
        while not group.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {seconds:.0f} s")
        return [read(path) for path in answers]
    except ProcessExitedException as error:
        return read(answers[error.error_index], error.exit_code)
    finally:
        for process in group.processes:
            process.kill()
            process.join()


def work(rank, folder, answers, environment, function, args, options):
    """Calls the function in this new process, the one of that rank, and writes its answer: (result, why it failed)."""
    for descriptor, path in enumerate([os.devnull, *(folder / name for name in OUTPUTS)]):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), descriptor)
    multiprocessing.set_start_method(None, force=True)  # the workers of a loader start as they do in training
    if environment:
        environment |= {"RANK": rank, "LOCAL_RANK": rank}
        os.environ |= {name: str(value) for name, value in environment.items()}
    try:
        found = function(*args, **options), None
        parallel.stop()
    except Exception as error:  # its frames, and so the loaders that they hold, end here
        found = None, (BadInput if isinstance(error, BadInput) else RuntimeError)(reason(error))
    answers[rank].write_bytes(pickle.dumps(found))
    if found[1]:
        end_workers()  # an error that a worker raised holds its loader
        sys.exit(1)  # so that start_processes ends the others


def read(path, exit_code=0):
    """Returns the result in a process's answer. Raises BadInput or RuntimeError, with the reason, if it failed."""
    written = path.read_bytes()
    if not written:  # exit code 255: its server was killed
        raise RuntimeError(KILLED if exit_code in (-9, 255) else f"exit code {exit_code}")
    result, error = pickle.loads(written)
    if error:
        raise error
    return result


@functools.cache
def context():
    """The way in which processes start. The fork server keeps this process's environment as of the first start."""
    if sys.platform != "linux":  # on macOS, its libraries do not survive a fork
        return multiprocessing.get_context("spawn")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    return server


def reason(error):
    """Says in one line why a measurement failed."""
    if is_out_of_memory(error):
        return "out of memory"
    if full := full_shared_memory(error):
        return full
    error = getattr(error, "inner_exception", error)  # of torch.compile's errors
    name = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
    return name + str(error).strip().partition("\n")[0]


def run_command(measurement, words, root):
    """Takes a measurement of the code in another folder, `root`, by `python -m lab.measure.measurements`.

    This process is not forked: all forks of a server share its memory layout, which may be a lucky one. Raises
    RuntimeError with the reason if it fails.
    """
    command = [sys.executable, "-m", "lab.measure.measurements", measurement, *words]
    environment = {"PYTHONPATH": str(root)}
    process = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ | environment)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    raise RuntimeError(reason_of_exit(process))


def reason_of_exit(process):
    """Says in one line why a process of subprocess.run, whose stderr was captured as text, failed."""
    last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    return KILLED if process.returncode == -9 else last.removeprefix("error: ")
