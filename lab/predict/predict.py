"""Predicts the memory and the least time of a step (trace.py), the largest micro-batch that fits, and a run's cost."""

import bisect
import dataclasses

import torch

from lab.predict import devices, roofline
from lab.predict.devices import Device
from lab.predict.roofline import Time
from lab.predict.trace import Memory, trace
from nanoladder import machine, parallel
from nanoladder.arithmetic import (
    CUTS,
    Grid,
    count_parameters,
    divide,
    flops_per_token,
    micro_batch_sizes,
    share_of_process,
)
from nanoladder.config import Config, check
from nanoladder.errors import BadInput


def predict_memory(config: Config, device_type: str = "cpu", world_size: int = 1) -> Memory:
    """Memory of a step in one of world_size processes, of a pipeline's in the one with the highest peak.

    On "cuda" these are the bytes of torch.cuda.max_memory_allocated: neither CUDA's context (about 0.5 GB) nor memory
    that the allocator caches. Without a GPU to ask, it counts as Hopper or Blackwell. A compiled step has the buffers
    that the compiler plans for such a device; autotuned products are left out, and so are messages that gloo's threads
    may keep on a CPU. Raises BadInput if the config leaves the step open, does not divide among the processes, or the
    optimizer's package is missing.
    """
    config, traced, processes = traces(config, device_type, world_size)
    memory, _ = max(processes, key=lambda process: process[0].peak)
    n_batches = 1 + (config.num_workers != 0)  # loader processes keep one ahead
    inputs = n_batches * config.batch_size // traced.batch_size * memory.inputs
    return dataclasses.replace(memory, inputs=inputs, peak=memory.peak + inputs - memory.inputs)


def predict_time(config: Config, device: Device, device_type: str = "cpu", world_size: int = 1) -> Time:
    """The Time of a step at the limits of a devices.Device, in the slowest of world_size processes.

    A compiled forward and backward count as fused; of the updates, torchao's alone is compiled. Raises BadInput as
    predict_memory does, and if the device has no rate for the config's dtype.
    """
    if config.dtype == "auto" and product_dtype(config, device_type) not in device.flops:
        config = dataclasses.replace(config, dtype=device.dtypes()[-1])
    if config.cuda_graph and world_size == 1 and machine.can_capture(config, torch.device(device_type)):
        device = dataclasses.replace(device, launch_seconds=devices.LAUNCH_IN_GRAPH)  # the host runs ahead of it
    share, traced, processes = traces(dataclasses.replace(config, compile=False), device_type, world_size)
    passes = share.batch_size / traced.batch_size
    tf32 = device_type == "cuda" and config.matmul_precision != "highest"
    keeps_memory = device_type == "cuda" or config.keep_memory
    times = []
    for _, work in processes:
        runs = roofline.fuse(work, update=config.optimizer == "adamw8bit") if config.compile else work
        times.append(roofline.least_time(runs, device, passes, tf32, keeps_memory))
    return max(times, key=lambda time: time.seconds)


def traces(config, device_type, world_size):
    """A process's share of the config, the traced config and its (Memory, Work); of a pipeline, at each place."""
    if config.sampled_softmax:
        why = "how many logits it has depends on the data, so its step is not predicted"
        raise BadInput(f"sampled_softmax={config.sampled_softmax}: {why}; expected --sampled_softmax=0")
    grid = divide(config, world_size)
    config = dataclasses.replace(config, dtype=product_dtype(config, device_type))
    check(config)  # in float16 there is no update in the backward
    parallel.check_grid(config, grid, torch.device("cpu"))
    config = share_of_process(config, world_size)
    n_traced, keeps_gradients = traced_micro_batches(config, grid)
    traced = dataclasses.replace(
        config,
        batch_size=n_traced * config.micro_batch_size,
        micro_batch_size=config.micro_batch_size if n_traced > 1 else 0,
        set_to_none=config.set_to_none and not keeps_gradients,
        # Fields that allocate nothing, or cannot be traced: configs that differ in them share a trace.
        **{"lazy_metrics": True, "num_workers": 0, "keep_memory": True, "matmul_precision": "highest"},
        ddp=False,
        # Of a step that is captured as a whole; the peak of several micro-batches is in a later one
        cuda_graph=config.cuda_graph
        and world_size * config.batch_size == config.micro_batch_size
        and machine.can_capture(config, torch.device(device_type)),
    )
    alone = grid.data == 1 or (config.shard == "none" and config.optimizer != "muon")  # which replicas divide
    if grid == Grid(data=grid.data) and alone:  # as in one process
        world_size = 1
        if not config.compiles_blocks:  # else these keys are the reason for it
            traced = dataclasses.replace(traced, shard="none", **dict.fromkeys(CUTS, 1))
    places = [place * world_size // grid.pipeline for place in range(grid.pipeline)]
    return config, traced, [trace(traced, device_type, world_size, rank) for rank in places]


def traced_micro_batches(config, grid):
    """Micro-batches to trace of one process's config, and if gradients are kept from one to the next, or by DDP.

    FSDP2 holds gradients in between that it makes in the first, a pipeline the activations of several. Without those, a
    later micro-batch takes what the first does if that finds gradients.
    """
    n = config.batch_size // config.micro_batch_size
    averaging = grid.data * grid.context > 1
    by_ddp = averaging and config.shard == "none" and grid.tensor * grid.pipeline == 1
    if grid.pipeline > 1:
        return n, False
    if averaging and not by_ddp:
        return min(n, 2), False
    return 1, n > 1 or by_ddp


def product_dtype(config, device_type):
    """Name of the dtype of matrix products. On a GPU, "auto" counts as bfloat16; float16 has the same size."""
    if config.dtype != "auto":
        return config.dtype
    if device_type == "cuda":
        return "bfloat16"
    return str(machine.choose_dtype("auto", torch.device("cpu"))).removeprefix("torch.")


def largest_micro_batch(config, memory_bytes, device_type="cpu", world_size=1):
    """Returns the largest micro_batch_size that divides the batch and whose predicted peak fits; 0 if none does."""

    def peak(size):
        return predict_memory(dataclasses.replace(config, micro_batch_size=size), device_type, world_size).peak

    sizes = micro_batch_sizes(config, divide(config, world_size)) or [0]  # 0: says why there is none
    if peak(sizes[-1]) <= memory_bytes:
        return sizes[-1]
    n_fitting = bisect.bisect_right(sizes[:-1], memory_bytes, key=peak)
    return sizes[n_fitting - 1] if n_fitting else 0


def costs(config: Config) -> dict:
    """The cost of a run: {n_params, flops_per_token, tokens, flops}."""
    per_token, tokens = flops_per_token(config), config.max_steps * config.batch_size * config.context_length
    return {
        "n_params": count_parameters(config),
        "flops_per_token": per_token,
        "tokens": tokens,
        "flops": per_token * tokens,
    }


def predict_row(
    name: str,
    config: Config | BadInput,
    device: Device | None,
    device_type: str = "cpu",
    world_size: int = 1,
    memory_gb: float | None = None,
) -> dict:
    """Returns a dict: a config's predicted memory, its least time on a devices.Device, and the run's speed and hours.

    With memory_gb (1e9 bytes), also the largest micro-batch that fits. If the config cannot be predicted, or is itself
    a BadInput, the dict has the reason as a note.
    """
    row = {"name": name, "note": None}
    try:
        if isinstance(config, BadInput):
            raise config
        cost, memory = costs(config), predict_memory(config, device_type, world_size)
        row |= {"memory": dataclasses.asdict(memory), "peak": memory.peak, "parameters": cost["n_params"]}
        row["tokens"] = cost["tokens"]
        if memory_gb:
            row["fits"] = largest_micro_batch(config, 1e9 * memory_gb, device_type, world_size)
        time = predict_time(config, device, device_type, world_size)  # pyright: ignore
        tokens_per_s = config.batch_size * config.context_length / time.seconds
        row |= {"time": time, "seconds": time.seconds, "tokens_per_s": tokens_per_s}
        row["mfu"] = tokens_per_s * cost["flops_per_token"] / (world_size * device.peak())
        row["hours"] = cost["tokens"] / tokens_per_s / 3600
    except BadInput as error:
        row["note"] = str(error)
    return row
