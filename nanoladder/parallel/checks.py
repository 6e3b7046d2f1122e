"""Checks that refuse processes started by halves, and configs that several processes cannot train."""

import os

import torch

from nanoladder.arithmetic import STAGES, Grid, micro_batch_size, micro_batch_sizes
from nanoladder.config import DEFAULTS, Config
from nanoladder.errors import BadInput
from nanoladder.machine import choose_dtype
from nanoladder.parallel.mesh import mesh

ADDRESS = "MASTER_ADDR"
LAUNCHED = "WORLD_SIZE", "RANK", "LOCAL_RANK", ADDRESS, "MASTER_PORT"  # set by torchrun in every process


def n_launched() -> int:
    """Number of processes that torchrun started, 1 without it. Raises BadInput unless all its variables are set."""
    if os.environ.get("WORLD_SIZE", "") in ("", "1"):
        return 1
    values = {name: os.environ.get(name, "") for name in LAUNCHED}
    wrong = [f"{name}={text}" for name, text in values.items() if not (text.isdecimal() or (text and name == ADDRESS))]
    if wrong:
        raise BadInput(
            f"several processes need {', '.join(LAUNCHED)}, but {', '.join(wrong)}; "
            "expected torchrun, which sets them, or for a single process: unset WORLD_SIZE"
        )
    return int(values["WORLD_SIZE"])


def check_processes(config, device, n, local_n):
    """Raises BadInput unless n processes, local_n of them on this machine, can train this config on this device."""
    if not config.ddp:
        raise BadInput("started by torchrun as several processes, which need ddp=True; expected `python train.py ...`")
    if device.type == "mps":
        raise BadInput(f"{n} processes on mps, which is one GPU; expected one process, or --device=cpu")
    n_devices = torch.cuda.device_count()
    if device.type == "cuda" and (local_n > n_devices or config.device.startswith("cuda:")):
        raise BadInput(
            f"device={config.device} with {local_n} processes on a machine with {n_devices} CUDA devices; "
            f"expected --device=auto or cuda, and at most --nproc_per_node={n_devices}"
        )


def check_grid(config: Config, grid: Grid, device: torch.device) -> None:
    """Raises BadInput if processes in this grid cannot train this config on this device."""
    if config.optimizer_in_backward and grid != Grid():
        raise BadInput(
            "optimizer_in_backward uses a gradient before it is averaged over the processes; "
            "expected --optimizer_in_backward=False, or one process"
        )
    check_batch(config, grid)
    check_whole(config, grid)
    if grid.pipeline > 1:
        check_pipeline(config, grid, device)


def check_batch(config, grid):
    """Raises BadInput unless each process along data gets an equal share of the batch, in whole micro-batches."""
    share, left_over = divmod(config.batch_size, grid.data)
    given = 0 if config.micro_batch_size == "auto" else config.micro_batch_size  # auto chooses a divisor
    micro = min(given, share) or 1
    if not share or left_over or share % micro:
        raise BadInput(
            f"batch_size={config.batch_size} does not divide among {grid.data} processes in micro-batches of {micro}; "
            f"expected a multiple of {grid.data * micro}, or another number of processes"
        )


def check_whole(config, grid):
    """Raises BadInput if the optimizer or a rung needs weights that a process holds only in part, or not at all."""
    optimizers = ["adafactor", "galore", "adamw8bit"] if grid.tensor > 1 else []
    if grid.pipeline > 1 and grid.data * grid.context > 1:  # FSDP2 averages gradients, as DTensors
        optimizers += ["adafactor", "galore"]
    rungs = ["x0_skip", "value_embedding", "smear", "sampled_softmax"] if grid.tensor > 1 or grid.pipeline > 1 else []
    rungs += ["tie_embeddings", "position", "embedding_norm"] if grid.pipeline > 1 else []
    refused = [key for key in rungs if getattr(config, key) != DEFAULTS[key]]
    for key in [*refused, "optimizer"] if config.optimizer in optimizers else refused:
        raise BadInput(
            f"{key}={getattr(config, key)} does not work in {grid} processes, which lack part of what it needs; "
            f"expected --{key}={DEFAULTS[key]}, or fewer processes"
        )


def check_pipeline(config, grid, device):
    """Raises BadInput if a pipeline of these processes cannot train this config on this device."""
    n, schedule = grid.pipeline, config.pipeline_schedule
    cut, n_stages = f"pipeline_parallel={n}", STAGES[schedule] * n
    if config.n_layer < n_stages:
        raise BadInput(
            f"{cut} with pipeline_schedule={schedule} needs {n_stages} stages of at least one block, but "
            f"n_layer={config.n_layer}; expected n_layer={n_stages} at least, or fewer processes"
        )
    if choose_dtype(config.dtype, device) == torch.float16:
        raise BadInput(
            f"{cut} does not scale the loss, as float16 needs (dtype={config.dtype}); expected "
            "--dtype=bfloat16 or float32"
        )
    sizes = micro_batch_sizes(config, grid)
    size = 1 if config.micro_batch_size == "auto" else micro_batch_size(config, grid)
    if size not in sizes:
        many = "or more" if schedule == "1f1b" else "or a multiple of it"
        expected = f"--micro_batch_size={sizes[-1]}" if sizes else f"a --batch_size of {n * grid.data * size} or more"
        raise BadInput(
            f"{cut} with pipeline_schedule={schedule} takes {n} micro-batches {many}, and micro_batch_size="
            f"{config.micro_batch_size} makes {config.batch_size // grid.data // size}; expected {expected}"
        )


def check_8_bits(model):
    """Raises BadInput if the state of 8-bit AdamW cannot be sharded."""
    n = mesh().n_sharing
    uneven = [f"{name} has {len(p)}" for name, p in model.named_parameters() if len(p) % n]
    if uneven:
        raise BadInput(
            f"optimizer=adamw8bit with shard={model.config.shard} needs equally many rows of a tensor in each of {n} "
            f"processes, but {uneven[0]}; expected multiples of {n} for --pad_vocab_to, --context_length and --n_embd, "
            "or --shard=none"
        )
