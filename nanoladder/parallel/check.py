"""Refusals: what a config cannot do in several processes."""

import dataclasses
import math

import torch

from nanoladder.errors import BadInput
from nanoladder.machine import eight_bit_library
from nanoladder.parallel.mesh import Grid, mesh


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
    if config.micro_batch_size == "auto":
        config = dataclasses.replace(config, micro_batch_size=1)  # auto chooses a divisor

    def divides(batch_size):
        share, left_over = divmod(batch_size, n)
        micro = min(config.micro_batch_size or share, share)
        return share > 0 and not left_over and share % micro == 0 and batch_size % (config.micro_batch_size or 1) == 0

    if not divides(config.batch_size):
        step = n * (config.micro_batch_size or 1)
        sizes = range(max(0, config.batch_size - step), config.batch_size + step + 1)
        less = [size for size in sizes if size < config.batch_size and divides(size)]
        more = [size for size in sizes if size > config.batch_size and divides(size)]
        micro = f" in micro-batches of {config.micro_batch_size}" if config.micro_batch_size else ""
        of_data = " along data" if grid != Grid(data=n) else ""
        raise BadInput(
            f"batch_size={config.batch_size} does not divide among {n} processes{of_data}{micro}; "
            f"expected batch_size {' or '.join(map(str, less[-1:] + more[:1]))}, or another number of processes"
        )


def check_tensor_parallel(config):
    """Raises BadInput if the optimizer needs whole matrices, or if a process would have no row of the vocabulary."""
    n = mesh().sizes.tensor
    if config.optimizer in ("adafactor", "galore", "adamw8bit"):
        needs = "quantizes rows" if config.optimizer == "adamw8bit" else "needs whole matrices"
        raise BadInput(
            f"optimizer={config.optimizer} {needs}, and tensor_parallel={n} leaves each process only a part of them; "
            "expected --tensor_parallel=1, or another --optimizer, such as adamw or lion"
        )
    rows = config.padded_vocab_size
    if math.ceil(rows / n) * (n - 1) >= rows:
        raise BadInput(
            f"vocab_size={config.vocab_size}: cut by tensor_parallel={n}, its {rows} rows leave the last process none; "
            f"expected --pad_vocab_to={n}"
        )


def check_8_bits(model, device):
    """Raises BadInput if the state of 8-bit AdamW cannot be sharded."""
    n = mesh().n_sharing
    uneven = [f"{name} has {len(p)}" for name, p in model.named_parameters() if len(p) % n]
    shard = model.config.shard
    if uneven:
        raise BadInput(
            f"optimizer=adamw8bit with shard={shard} needs as many rows of a tensor in each of {n} processes, and "
            f"{uneven[0]}; expected --pad_vocab_to, --context_length and --n_embd to be multiples of {n}, or "
            "--shard=none"
        )
    if eight_bit_library(device) == "bitsandbytes":
        raise BadInput(
            f"optimizer=adamw8bit with shard={shard} and pipeline_parallel={model.config.pipeline_parallel} needs "
            "torchao; install it, or use --optimizer=adamw"
        )
