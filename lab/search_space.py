"""Search space of --mode=tune: the settings that it may change, and the values to try from a config on.

Values are those that Config declares; numbers go in steps of two or more. No setting changes the model, the batch of an
update, or the optimizer: a step stays the same but for its time and memory.
"""

import math
from typing import get_args

from nanoladder.config import TYPES
from nanoladder.kernels import count_chunks
from nanoladder.machine.device import ATTENTION_KERNELS
from nanoladder.parallel import divide, micro_batch_sizes

GRAPHS = ("reduce-overhead", "max-autotune")  # modes of the compiler that need CUDA
CHUNKS = (0, 2, 8, 32)
WORKERS = (0, 1, 2, 4, 8)
PADDING = (1, 8, 64, 128)
INTERACTING = ("attention", "compile", "micro_batch_size", "loss_chunks")  # the best value depends on the others


def directions(config, machine):
    """{setting: its directions from a config on}, in the order of what they are likely to gain.

    A direction is a list of changes {key: value}. If one costs a lot, those after it are left out: they go further the
    same way. machine: as of devices.describe().
    """
    on_gpu = bool(machine["gpu"])
    rows = config.micro_batch_size or config.batch_size
    sizes = micro_batch_sizes(config, divide(config, 1))
    sizes = [size for size in sizes if size in (2 ** (size.bit_length() - 1), config.batch_size)]
    chunks = count_chunks(config.loss_chunks, rows * config.context_length, config.padded_vocab_size)
    workers = [n for n in WORKERS if n <= max(2, machine["threads"])]
    padding = [n for n in PADDING if n * math.ceil(config.vocab_size / n) != config.padded_vocab_size]
    has = {"bfloat16": machine["native_bfloat16"], "float16": on_gpu, "float32": True}  # the others are emulated
    dtypes = [name for name, fast in has.items() if fast]
    now = dtypes[0] if config.dtype == "auto" else config.dtype
    modes = [mode for mode in values("compile_mode") if on_gpu or mode not in GRAPHS]
    # CUDA graphs launch all kernels of a pass at once: the most that a small model has to gain on a GPU
    graphs = [[{"compile": True, "compile_mode": GRAPHS[0]}]] if on_gpu else []
    scopes = [[{"compile": True, "compile_scope": scope}] for scope in values("compile_scope")]
    return {
        "graphs": graphs,
        "attention": each("attention", attention_kernels(on_gpu)),
        "compile": [[{"compile": False}], *scopes],
        "micro_batch_size": [
            [{"micro_batch_size": change["micro_batch_size"] % config.batch_size} for change in way]
            for way in down_and_up("micro_batch_size", sizes, rows)
        ],
        "checkpointing": each("checkpointing", ["none"]),
        "dtype": each("dtype", [name for name in dtypes if name != now]),
        "keep_memory": each("keep_memory", values("keep_memory")),
        "adamw_impl": each("adamw_impl", values("adamw_impl") if config.optimizer == "adamw" else ()),
        "num_workers": down_and_up("num_workers", workers, config.num_workers),
        "loss_chunks": down_and_up("loss_chunks", CHUNKS, chunks),
        "set_to_none": each("set_to_none", values("set_to_none")),
        "lazy_metrics": each("lazy_metrics", values("lazy_metrics")),
        "matmul_precision": each("matmul_precision", values("matmul_precision")),
        "pad_vocab_to": down_and_up("pad_vocab_to", padding, config.pad_vocab_to),
        "compile_mode": [[{"compile": True, "compile_mode": mode}] for mode in modes],  # takes minutes, so last
    }


def values(key):
    """The values that Config declares for a key; those of a switch are both."""
    return get_args(TYPES[key]) or (True, False)


def each(key, numbers):
    """A direction for each value of a key: they have no order."""
    return [[{key: value}] for value in numbers]


def down_and_up(key, numbers, now):
    """The directions down and up from the number of now."""
    below = [number for number in reversed(numbers) if number < now]
    return [[{key: number} for number in way] for way in (below, [n for n in numbers if n > now])]


def attention_kernels(on_gpu):
    """Kernels of this machine: blocks are for CPUs; a CPU has one fused kernel, and naming it changes nothing.

    On a GPU those that write the (T, T) matrix to memory come last: they hardly ever win, and compile anew.
    """
    others = ("auto", "blocks") if on_gpu else ("auto", *ATTENTION_KERNELS)
    kernels = [name for name in values("attention") if name not in others]
    return sorted(kernels, key=("matmul", "math").__contains__) if on_gpu else kernels
