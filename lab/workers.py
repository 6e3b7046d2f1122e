"""Starts processes as torchrun does, but forked from one that has imported torch and the compiler.

A fork takes a tenth of a second of a processor; that import takes three. Not here: restarts, and several machines.
"""

import os
import sys
import time
from pathlib import Path

import torch.multiprocessing
from torch.distributed import TCPStore

OUTPUTS = "stdout", "stderr"

DISTRIBUTED = [f"torch.distributed.{name}" for name in ("fsdp", "tensor.parallel", "pipelining")]
torch.multiprocessing.set_forkserver_preload(["torch._inductor.compile_fx", *DISTRIBUTED, "lab.equal_worker"])


def run(function, *args, n, folder, seconds=3600):
    """Calls function(*args) in each of n processes that find one another, and keeps what they print in the folder.

    Once one fails, ends the others and raises PyTorch's ProcessRaisedException or ProcessExitedException. Raises
    TimeoutError if they run for longer than so many seconds.
    """
    for name in OUTPUTS:
        Path(folder, name).write_bytes(b"")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun keeps one
    given = n, store.port, folder, function, args
    processes = torch.multiprocessing.start_processes(enter, given, n, join=False, start_method="forkserver")
    deadline = time.monotonic() + seconds
    try:
        while not processes.join(max(0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{n} processes still run after {seconds} s")
    finally:
        for process in processes.processes:
            process.kill()


def enter(rank, n, port, folder, function, args):
    """Calls function(*args) in this fork, which becomes the process of that rank."""
    for name in OUTPUTS:
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_APPEND), getattr(sys, name).fileno())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "OMP_NUM_THREADS": 1}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ |= {name: str(value) for name, value in variables.items()}
    function(*args)
