"""Process group: joining and leaving it, agreement checks, and collective operations.

`torchrun` starts the processes and passes each its rank in environment variables. A single process needs no group:
there, every function is a no-op or returns its input.
"""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nanoladder.arithmetic import count_sharing, divide
from nanoladder.config import Config
from nanoladder.errors import BadInput
from nanoladder.machine import allow_open_files
from nanoladder.parallel import flag, heartbeat
from nanoladder.parallel.checks import check_grid, check_processes, n_launched
from nanoladder.parallel.mesh import mesh, set_mesh
from nanoladder.private import set_timeout

LONG = timedelta(hours=1)  # time limit of starting and leaving: one process may compile, load or write for the others
# Groups that were left. DDP, freeing the last reference, would hold the GIL that gloo's thread may need: a deadlock.
LEFT = []

STORE: Any = None  # torchrun's store, after joining a group


def world_size() -> int:
    """Number of processes; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Rank of this process, counted from 0; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def init_process_group(config: Config, device: torch.device) -> torch.device:
    """Joins the process group if torchrun started several processes. Returns this process's device.

    Raises BadInput if the config does not support several processes, or if the batch or the devices do not divide
    among them.
    """
    n = n_launched()
    if n == 1:
        return device
    local_n = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    check_processes(config, device, n, local_n)
    grid = divide(config, n)
    n_sharing = count_sharing(config, grid, local_n)
    check_grid(config, grid, device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    elif os.environ.get("OMP_NUM_THREADS") == "1":  # torchrun's default
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_n))
    if not dist.is_initialized():
        global STORE
        STORE = meeting_place()
        backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        number = int(os.environ["RANK"])
        allow_open_files()
        dist.init_process_group(backend, timeout=LONG, store=STORE, rank=number, world_size=n, device_id=device_id)
        heartbeat.start(meeting_place(), number, n, config.collective_timeout)
    set_mesh(grid, rank(), n_sharing, device.type)
    if rank() > 0:  # only rank 0 prints
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return device


def meeting_place(seconds=300):
    """torchrun's store, where processes find each other's addresses.

    On one node the store outlives the processes, so each restart has its own keys. Several nodes may count restarts
    differently.
    """
    store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))
    on_one_node = os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE")
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if on_one_node else "nodes", store)


def limit_collectives(config: Config) -> None:
    """Limits the time of later collectives to collective_timeout. For after the first step, which may compile."""
    if dist.is_initialized() and config.collective_timeout:
        set_timeout(config.collective_timeout, but=vars(mesh()).get("cpu_group"))


def destroy_process_group() -> None:
    """Waits for every process, one of which may still write its last file. Then leaves the group."""
    if dist.is_initialized():
        heartbeat.stop(meeting_place(), LONG)
        dist.barrier()
        LEFT.append(dist.group.WORLD)
        dist.destroy_process_group()


def already_printed(line: str) -> bool:
    """True if another process of this attempt has printed this line, according to torchrun's store."""
    try:
        return meeting_place(seconds=10).add(line, 1) > 1
    except (dist.DistError, ValueError, KeyError):  # no store
        return False


def require_agreement(facts: dict[str, Any], what: str) -> None:
    """Raises BadInput in every process if the facts, {name: value}, of any process differ from rank 0's. Collective."""
    everyone = gather_objects(facts)
    for number, values in enumerate(everyone):
        for name, value in everyone[0].items():
            if values[name] != value:
                raise BadInput(
                    f"the processes differ in their {what}: rank {number} has {name}={values[name]}, "
                    f"rank 0 {name}={value}; expected the same on every machine"
                )


def all_reduce_mean(tensor: torch.Tensor) -> torch.Tensor:
    """Mean of a number () over all processes, on its device, without a host synchronization. Collective."""
    if world_size() > 1:
        tensor = flag.beside(tensor)
        dist.all_reduce(tensor)
        tensor = flag.taken_from(tensor / world_size())
    return tensor


def add(number: float) -> float:
    """Sum of a number over all processes. Collective."""
    return sum(gather_objects(number))


def gather_objects(value: Any, group: Any = None) -> list:
    """Lists the values of all processes, or of those of a group, by rank. Collective."""
    everyone = [value]
    if world_size() > 1:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, value, group)
    return everyone
