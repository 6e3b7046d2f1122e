"""Memory of a run: halves micro_batch_size=auto until a step fits, explains out-of-memory errors."""

import dataclasses
import gc
import sys
from pathlib import Path

import torch

from nanoladder import checkpoint, machine, parallel
from nanoladder.arithmetic import divide, micro_batch_sizes
from nanoladder.config import Config
from nanoladder.private import loaded_compiler
from nanoladder.run.start import CONFIG, changes, read_config, write_config

# The cheapest first
SMALLER = "a smaller --micro_batch_size, --activation_checkpointing=every:1 or --optimizer=adamw8bit"


# -- before training


def resolve_micro_batch(config: Config) -> Config:
    """Returns the config with a numeric micro_batch_size, the same in every process, in place of auto. Collective."""
    if config.micro_batch_size != "auto":
        return config
    size, reason = parallel.gather_objects(first_micro_batch(config))[0]  # as rank 0 finds config.json
    print(f"micro_batch_size={size}: {reason}", flush=True)
    return dataclasses.replace(config, micro_batch_size=size)


def first_micro_batch(config):
    """Returns the micro_batch_size to begin with, and the reason as text.

    A resumed run keeps its size: with another one, gradients would be summed in another order. So does a run that
    starts over with the same keys; record() may have halved its size. Any other begins with the largest.
    """
    sizes = micro_batch_sizes(config, parallel.mesh().sizes)
    folder = Path(config.out_dir)
    before = read_config(folder / CONFIG)
    size = before.get("micro_batch_size")
    resumes = config.init_from in ("resume", "auto") and checkpoint.list_checkpoints(folder)
    if size in sizes and (resumes or not changes(dataclasses.replace(config, micro_batch_size=size), before)):
        return size, "as before"
    return sizes[-1], "to be halved whenever memory runs out"


# -- out of memory


class OutOfMemory(MemoryError):
    """Raised by a Run whose memory ran out. config: its config."""

    def __init__(self, error: BaseException, config: Config, device: torch.device) -> None:
        super().__init__(describe(error))
        self.config, self.device = config, device


def describe(error):
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".: ")


def halve_micro_batch(config: Config, error: Exception) -> Config | None:
    """Returns the config of the next attempt at a run with micro_batch_size=auto whose memory ran out.

    As accelerate's find_executable_batch_size does. It continues from the run's last checkpoint, if there is one, with
    half the size, which config.json records. Returns None, after an explanation, if a smaller size would not help: if
    there is none, or memory ran out before the first step. Also if there are several processes: one that runs out of
    memory exits, because the others wait for it in the middle of a step, and the next attempt of all of them takes
    half the size.
    """
    error.__traceback__ = error.__context__ = None  # they refer to the model
    if not isinstance(error, OutOfMemory):  # of a Run
        return explain(describe(error))
    release_memory(error.device)
    size = half_of_micro_batch(error.config) if config.micro_batch_size == "auto" else 0
    size = size and record(error.config, size)
    if not size or parallel.world_size() > 1:
        return explain(error, size)
    print(f"micro_batch_size={error.config.micro_batch_size} does not fit ({error}): trying {size}", flush=True)
    checkpoints = checkpoint.list_checkpoints(Path(config.out_dir))
    return dataclasses.replace(config, init_from="resume") if checkpoints else config


def half_of_micro_batch(config):
    """The largest valid size of at most half the config's micro-batch size; 0 if there is none."""
    sizes = micro_batch_sizes(config, divide(config, parallel.world_size()))
    return max((size for size in sizes if 2 * size <= config.micro_batch_size), default=0)


def record(config, size):
    """Makes the next attempt at a run that began with this config use this size, through its config.json.

    Returns the size; 0 if the run had not begun. Of several processes, the first one writes it.
    """
    halved, before = dataclasses.replace(config, micro_batch_size=size), read_config(Path(config.out_dir, CONFIG))
    if before == dataclasses.asdict(config):
        write_config(config.out_dir, halved)
    return size if before in map(dataclasses.asdict, (config, halved)) else 0


def release_memory(device):
    """Frees what an interrupted run leaves behind: reference cycles, compiled code, the allocator's cache, its peak."""
    gc.collect()
    if loaded_compiler():
        torch.compiler.reset()
    if device.type != "cpu":
        torch.get_device_module(device.type).empty_cache()
    machine.reset_peak_memory(device)


def explain(reason, next_size=0):
    """Prints why memory ran out, and what to change. Only one process prints.

    next_size: micro_batch_size of the next attempt; 0: none that would take less memory.
    """
    if parallel.world_size() == 1 or not parallel.already_printed("error: out of memory"):
        advice = f"expected a smaller step, by {SMALLER}; docs/memory.md shows how to predict each"
        if next_size:
            advice = f"the same command with --init_from=auto continues with micro_batch_size={next_size}"
            advice += "; torchrun --max-restarts=10 does so automatically"
        elif machine.has_limit():
            advice += "; this process's memory is limited (ulimit -v, -d)"
        print(f"error: out of memory: {reason}; {advice}", file=sys.stderr)
