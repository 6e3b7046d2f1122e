"""Refusals: what a config cannot do in several processes."""

import math

import torch

from nanoladder.errors import BadInput
from nanoladder.machine import choose_dtype
from nanoladder.parallel.mesh import Grid, mesh
from nanoladder.parallel.pipeline import STAGES, micro_batch_size, micro_batch_sizes


def check_processes(config, device, n, local_n):
    """Raises BadInput unless n processes, local_n of them on this machine, can train this config on this device."""
    if not config.ddp:
        raise BadInput("started by torchrun as several processes, which need ddp=True; expected `python train.py ...`")
    if device.type == "mps":
        raise BadInput(f"{n} processes on mps, which is one GPU; expected one process, or --device=cpu")
    if config.optimizer_in_backward:
        raise BadInput(
            f"optimizer_in_backward uses a gradient before it is averaged over the {n} processes; "
            "expected --optimizer_in_backward=False, or one process"
        )
    n_devices = torch.cuda.device_count()
    if device.type == "cuda" and (local_n > n_devices or config.device.startswith("cuda:")):
        raise BadInput(
            f"device={config.device} with {local_n} processes on a machine with {n_devices} CUDA devices; "
            f"expected --device=auto or cuda, and at most --nproc_per_node={n_devices}"
        )


def check_batch(config, grid):
    """Raises BadInput unless each process along data gets an equal share of the batch, in whole micro-batches."""
    n = grid.data
    share, left_over = divmod(config.batch_size, n)
    given = 0 if config.micro_batch_size == "auto" else config.micro_batch_size  # auto chooses a divisor
    micro = min(given, share) or 1
    if not share or left_over or share % micro:
        below = config.batch_size // (n * micro) * n * micro
        nearest = " or ".join(str(size) for size in (below, below + n * micro) if size)
        of_data = " along data" if grid != Grid(data=n) else ""
        in_micro_batches = f" in micro-batches of {given}" if given else ""
        raise BadInput(
            f"batch_size={config.batch_size} does not divide among {n} processes{of_data}{in_micro_batches}; "
            f"expected batch_size {nearest}, or another number of processes"
        )


def check_pipeline(config, grid, device):
    """Raises BadInput if a pipeline of these processes cannot train this config on this device."""
    n, schedule = grid.pipeline, config.pipeline_schedule
    if n == 1:
        return
    cut, n_stages = f"pipeline_parallel={n}", STAGES[schedule] * n
    if config.n_layer < n_stages:
        raise BadInput(
            f"{cut} with pipeline_schedule={schedule} has {n_stages} stages of a block or more, and "
            f"n_layer={config.n_layer}; expected n_layer={n_stages} at least, or fewer processes"
        )
    if choose_dtype(config.dtype, device) == torch.float16:
        raise BadInput(
            f"{cut} does not scale the loss, as float16 needs, which dtype={config.dtype} is here; expected "
            "--dtype=bfloat16 or float32"
        )
    if config.optimizer in ("adafactor", "galore") and grid.data * grid.context > 1:
        raise BadInput(
            f"optimizer={config.optimizer} needs plain tensors, and data parallelism beside {cut} makes DTensors of "
            f"them; expected --optimizer=adamw8bit, or {n} processes"
        )
    sizes = micro_batch_sizes(config, grid)
    size = 1 if config.micro_batch_size == "auto" else micro_batch_size(config, grid)
    if size not in sizes:
        many = "or more" if schedule == "1f1b" else "or a multiple of it"
        step = n * grid.data * size
        wider = f"--batch_size={math.ceil(config.batch_size / step) * step}"
        expected = f"--micro_batch_size={sizes[-1]}" if sizes else wider
        raise BadInput(
            f"{cut} with pipeline_schedule={schedule} takes {n} micro-batches {many}, and micro_batch_size="
            f"{config.micro_batch_size} makes {config.batch_size // grid.data // size}; expected {expected}"
        )


def check_tensor_parallel(config):
    """Raises BadInput if the optimizer needs whole rows or matrices."""
    n = mesh().sizes.tensor
    if config.optimizer in ("adafactor", "galore", "adamw8bit"):
        raise BadInput(
            f"optimizer={config.optimizer} needs whole rows or matrices, and tensor_parallel={n} leaves each process "
            "only a part of them; expected --tensor_parallel=1, or another --optimizer, such as adamw or lion"
        )


def check_8_bits(model):
    """Raises BadInput if the state of 8-bit AdamW cannot be sharded."""
    n = mesh().n_sharing
    uneven = [f"{name} has {len(p)}" for name, p in model.named_parameters() if len(p) % n]
    if uneven:
        raise BadInput(
            f"optimizer=adamw8bit with shard={model.config.shard} needs as many rows of a tensor in each of {n} "
            f"processes, and {uneven[0]}; expected multiples of {n} for --pad_vocab_to, --context_length and --n_embd, "
            "or --shard=none"
        )
