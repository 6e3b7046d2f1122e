"""Knobs: the fields of a config that --mode=tune may change. A step stays the same but for its time and memory.

Each knob gives ways to go: lists of changes {field: value}. If a change on a way costs a lot, those after it are left
out: they go further in the same direction. Values are those that Config declares; numbers go in steps of two or more.
No knob changes the model, the batch of an update, or the optimizer.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, get_args

import torch

from lab import predict
from lab.plan import in_one_process
from nanoladder.config import TYPES
from nanoladder.errors import BadInput
from nanoladder.kernels import count_chunks
from nanoladder.machine.device import ATTENTION_KERNELS
from nanoladder.run.memory import divisors

GRAPHS = ("reduce-overhead", "max-autotune")  # modes of the compiler that need CUDA
CHUNKS = (0, 2, 8, 32)
WORKERS = (0, 1, 2, 4, 8)
PADDING = (1, 8, 64, 128)


class Machine(NamedTuple):
    """The facts of a machine that knobs depend on. memory: the bytes that a step may take, or None."""

    on_gpu: bool
    native_bfloat16: bool
    threads: int
    memory: float | None = None

    @property
    def device_type(self):
        return "cuda" if self.on_gpu else "cpu"


class Knob(NamedTuple):
    """ways: a function of the config of the moment and of the machine. interacts: its best value depends on others."""

    name: str
    ways: Callable
    interacts: bool = False


def values(field):
    """The values that Config declares for a field; those of a switch are both."""
    return get_args(TYPES[field]) or (True, False)


def each(field):
    """The ways of a knob whose values have no order."""
    return lambda config, machine: [[{field: value}] for value in values(field)]


def walk(field, numbers, now):
    """The ways down and up from the number of now."""
    below = [number for number in reversed(numbers) if number < now]
    return [[{field: number} for number in way] for way in (below, [n for n in numbers if n > now])]


def attention(config, machine):
    """Kernels of this machine: blocks are for CPUs; a CPU has one fused kernel, and naming it changes nothing.

    On a GPU those that write the (T, T) matrix to memory come last: they hardly ever win, and compile anew.
    """
    others = ["auto"] if machine.on_gpu else ["auto", *ATTENTION_KERNELS]
    if machine.on_gpu or config.dropout:
        others.append("blocks")
    last = ("matmul", "math") if machine.on_gpu else ()
    found = sorted(values("attention"), key=last.__contains__)
    return [[{"attention": value}] for value in found if value not in others]


def compiling(config, machine):
    scopes = [{"compile": True, "compile_scope": scope} for scope in values("compile_scope")]
    return [[change] for change in [{"compile": False}, *scopes]]


def graphs(config, machine):
    """CUDA graphs launch all kernels of a pass at once, the most that a small model has to gain on a GPU."""
    return [[{"compile": True, "compile_mode": GRAPHS[0]}]] if machine.on_gpu else []


def compile_modes(config, machine):
    """A search among kernels takes minutes, so it comes last."""
    modes = [mode for mode in values("compile_mode") if machine.on_gpu or mode not in GRAPHS]
    return [[{"compile": True, "compile_mode": mode}] for mode in modes]


def micro_batches(config, machine):
    """From the micro-batch of now, each at most half or at least twice as large as the one before."""
    total = config.batch_size
    now = config.micro_batch_size or total
    down, up, sizes = [now], [now], divisors(total)
    for size in reversed(sizes):
        down += [size] * (2 * size <= down[-1])
    for size in sizes:
        up += [size] * (size >= 2 * up[-1])
    return [[{"micro_batch_size": size % total} for size in way[1:]] for way in (down, up)]


def checkpointing(config, machine):
    """Without a limit of memory recomputing only costs; with one, the memory it frees goes to larger micro-batches."""
    if not machine.memory:
        return [[{"checkpointing": "none"}]]
    found = []
    for value in ("none", "selective", "every:1"):
        changed = dataclasses.replace(config, checkpointing=value)
        size = predict.largest_micro_batch(changed, machine.memory, machine.device_type)
        found += [[{"checkpointing": value, "micro_batch_size": size % config.batch_size}]] * (size > 0)
    return found


def dtypes(config, machine):
    """Those that are not emulated: a hundred times slower than float32 on a CPU."""
    fast = ["float32"] + ["bfloat16"] * machine.native_bfloat16 + ["float16"] * machine.on_gpu
    return [[{"dtype": value}] for value in values("dtype") if value in fast]


def loss_chunks(config, machine):
    n_tokens = (config.micro_batch_size or config.batch_size) * config.context_length
    return walk("loss_chunks", CHUNKS, count_chunks(config.loss_chunks, n_tokens, config.padded_vocab_size))


def workers(config, machine):
    return walk("num_workers", [n for n in WORKERS if n <= max(2, machine.threads)], config.num_workers)


def padding(config, machine):
    return walk("pad_vocab_to", PADDING, config.pad_vocab_to)


KNOBS = [  # in the order of what they are likely to gain
    Knob("graphs", graphs),
    Knob("attention", attention, interacts=True),
    Knob("compile", compiling, interacts=True),
    Knob("micro_batch_size", micro_batches, interacts=True),
    Knob("checkpointing", checkpointing),
    Knob("dtype", dtypes),
    Knob("keep_memory", each("keep_memory")),
    Knob("adamw_impl", each("adamw_impl")),
    Knob("num_workers", workers),
    Knob("loss_chunks", loss_chunks, interacts=True),
    Knob("set_to_none", each("set_to_none")),
    Knob("lazy_metrics", each("lazy_metrics")),
    Knob("matmul_precision", each("matmul_precision")),
    Knob("pad_vocab_to", padding),
    Knob("compile_mode", compile_modes),
]


def normal(config, machine):
    """A normal form of a config whose vocab_size is known: two that take the same step here have the same."""
    auto = "bfloat16" if machine.native_bfloat16 else "float16" if machine.on_gpu else "float32"
    dtype = auto if config.dtype == "auto" else config.dtype
    plain = {"compile_scope": "model", "compile_mode": "default"} if not config.compile else {}
    config = in_one_process(config, machine.device_type, getattr(torch, dtype))
    return dataclasses.replace(
        config,
        dtype=dtype,
        adamw_impl=config.adamw_impl if config.optimizer == "adamw" else "",
        vocab_size=config.padded_vocab_size,
        pad_vocab_to=1,
        **plain,
    )


def fitting(config, machine):
    """The changes with which a config's step is predicted to fit the memory; none if it does already.

    The least recomputing, and then the largest micro-batch. Raises BadInput if nothing fits.
    """
    if not machine.memory or predict.predict_memory(config, machine.device_type).peak <= machine.memory:
        return {}
    for value in (config.checkpointing, "selective", "every:1"):
        if value == "selective" and config.compile_scope == "block":
            continue
        changed = dataclasses.replace(config, checkpointing=value)
        if size := predict.largest_micro_batch(changed, machine.memory, machine.device_type):
            size %= config.batch_size
            return {"checkpointing": value, "micro_batch_size": size}
    least = predict.predict_memory(dataclasses.replace(changed, micro_batch_size=1), machine.device_type).peak
    raise BadInput(
        f"memory_gb={machine.memory / 1e9:g}: not one sequence fits, even recomputing every block; expected at least "
        f"--memory_gb={least / 1e9 + 0.0005:.3f}, or a smaller model or context_length"
    )
