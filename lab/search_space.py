"""Search space of --mode=tune: the settings that it may change, and the values to try from a config on.

Each setting has directions: lists of changes {key: value}. If a change costs a lot, those after it in its list are left
out: they go further in the same direction. Values are those that Config declares; numbers go in steps of two or more.
No setting changes the model, the batch of an update, or the optimizer: a step stays the same but for its time and
memory.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, get_args

import torch

from lab.plan import in_one_process
from nanoladder.config import TYPES
from nanoladder.kernels import count_chunks
from nanoladder.machine.device import ATTENTION_KERNELS
from nanoladder.run.memory import divisors

GRAPHS = ("reduce-overhead", "max-autotune")  # modes of the compiler that need CUDA
CHUNKS = (0, 2, 8, 32)
WORKERS = (0, 1, 2, 4, 8)
PADDING = (1, 8, 64, 128)


class Machine(NamedTuple):
    """The facts of a machine that the search space depends on."""

    on_gpu: bool
    native_bfloat16: bool
    threads: int

    @property
    def device_type(self):
        return "cuda" if self.on_gpu else "cpu"


class Setting(NamedTuple):
    """directions: a function of the present config and the machine. interacts: its best value depends on others."""

    name: str
    directions: Callable
    interacts: bool = False


def values(key):
    """The values that Config declares for a key; those of a switch are both."""
    return get_args(TYPES[key]) or (True, False)


def every(key):
    """A setting of one key whose values have no order."""
    return Setting(key, lambda config, machine: [[{key: value}] for value in values(key)])


def down_and_up(key, numbers, now):
    """The directions down and up from the number of now."""
    below = [number for number in reversed(numbers) if number < now]
    return [[{key: number} for number in way] for way in (below, [n for n in numbers if n > now])]


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
    """From the present micro-batch, each at most half or at least twice as large as the one before."""
    total = config.batch_size
    now = config.micro_batch_size or total
    down, up, sizes = [now], [now], divisors(total)
    for size in reversed(sizes):
        down += [size] * (2 * size <= down[-1])
    for size in sizes:
        up += [size] * (size >= 2 * up[-1])
    return [[{"micro_batch_size": size % total} for size in way[1:]] for way in (down, up)]


def dtypes(config, machine):
    """Those that are not emulated: a hundred times slower than float32 on a CPU."""
    fast = ["float32"] + ["bfloat16"] * machine.native_bfloat16 + ["float16"] * machine.on_gpu
    return [[{"dtype": value}] for value in values("dtype") if value in fast]


def loss_chunks(config, machine):
    n_tokens = (config.micro_batch_size or config.batch_size) * config.context_length
    return down_and_up("loss_chunks", CHUNKS, count_chunks(config.loss_chunks, n_tokens, config.padded_vocab_size))


def workers(config, machine):
    return down_and_up("num_workers", [n for n in WORKERS if n <= max(2, machine.threads)], config.num_workers)


SETTINGS = [  # in the order of what they are likely to gain
    Setting("graphs", graphs),
    Setting("attention", attention, interacts=True),
    Setting("compile", compiling, interacts=True),
    Setting("micro_batch_size", micro_batches, interacts=True),
    Setting("checkpointing", lambda config, machine: [[{"checkpointing": "none"}]]),
    Setting("dtype", dtypes),
    every("keep_memory"),
    every("adamw_impl"),
    Setting("num_workers", workers),
    Setting("loss_chunks", loss_chunks, interacts=True),
    every("set_to_none"),
    every("lazy_metrics"),
    every("matmul_precision"),
    Setting("pad_vocab_to", lambda config, machine: down_and_up("pad_vocab_to", PADDING, config.pad_vocab_to)),
    Setting("compile_mode", compile_modes),
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
