"""Checks of keys and values: a name that exists, the right type, a value in range, a combination that can work.

Every refusal is one line that says which key, its value, what was expected and what to do.
"""

import math
import re
from typing import Literal, get_args, get_origin

from nanoladder.config.keys import DEFAULTS, INSTEAD, TYPES, WORDS
from nanoladder.errors import BadInput, nearest

# Ranges of the numbers; every other number is at least 0.
AT_LEAST_1 = ("n_layer", "n_head", "n_embd", "context_length", "batch_size", "pad_vocab_to", "keep_checkpoints")
AT_LEAST_1 += ("tensor_parallel", "context_parallel", "pipeline_parallel")
BELOW_1 = ("dropout", "beta2")


# -- names and types


def known(key, where, options=()):
    """Raises BadInput if there is no such key; names the nearest among the keys and `options`, a script's own."""
    if key in INSTEAD:
        raise BadInput(f"{where}: {key} is no key here; expected {INSTEAD[key]} (docs/from-nanogpt.md)")
    if key not in DEFAULTS:
        raise BadInput(f"{where}: unknown key {key!r}{nearest(key, [*DEFAULTS, *options])}; --help lists every key")


def typed(key, value, where):
    """Returns the value as the key's type: an int becomes a float if the key takes one. Raises BadInput otherwise."""
    kind = TYPES[key]
    if value in WORDS.get(key, ()):  # a word that the key takes in place of a number
        return value
    if kind is float and type(value) is int:
        value = float(value)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            question = nearest(str(value), get_args(kind))
            raise BadInput(f"{where}: {key}={value}: expected {expected(key)}{question}")
    elif type(value) is not kind or (kind is float and not math.isfinite(value)) or (value == "" and DEFAULTS[key]):
        raise BadInput(f"{where}: {key}={value!r}: expected {expected(key)}, such as {key}={DEFAULTS[key]}")
    elif kind is str and not value.isprintable():
        raise BadInput(f"{where}: {key}={value!r}: expected printable characters")
    return value


def expected(key):
    """The values that a key takes, in words."""
    kind = TYPES[key]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    text = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}[kind]
    return " or ".join([text, *WORDS.get(key, ())])


# -- ranges and combinations


def check(config):
    """Raises BadInput for values out of range or that cannot work together, before anything is loaded or written."""
    for key, value in vars(config).items():
        if TYPES[key] in (int, float) and value not in WORDS.get(key, ()):
            least = 1 if key in AT_LEAST_1 else 0
            end = 1 if key in BELOW_1 else 2**63 if type(value) is int else math.inf  # 64 bits
            if not least <= value < end:
                raise BadInput(f"{key}={value}: expected at least {least}, and below {end}")
    for message in [*impossible(config), *impossible_recipes(config)]:
        raise BadInput(message)


def impossible(c):
    """Yields a line for each combination of values in a config that cannot work."""
    sizes = f"n_head={c.n_head}, tensor_parallel={c.tensor_parallel}, context_parallel={c.context_parallel}"
    if c.n_embd % c.n_head:
        yield f"n_embd={c.n_embd} does not divide into n_head={c.n_head} heads; expected a multiple of n_head"
    if c.micro_batch_size not in (0, "auto") and c.batch_size % c.micro_batch_size:
        yield (
            f"batch_size={c.batch_size} does not divide into micro-batches of micro_batch_size={c.micro_batch_size}; "
            "expected a divisor of batch_size, or --micro_batch_size=auto"
        )
    if c.n_head % c.tensor_parallel:
        yield f"the heads do not divide among processes ({sizes}); expected tensor_parallel to be a divisor of n_head"
    if c.context_length % (pieces := count_pieces(c)):
        yield (
            f"context_length={c.context_length} does not divide into {pieces} pieces ({sizes}); "
            f"expected a multiple of {pieces}"
        )
    if gathers_keys(c) and c.attention in ("matmul", "blocks", "cudnn"):
        yield (
            f"attention={c.attention} takes as many queries as keys, and context_parallel gathers more keys, as it "
            f"does not divide a process's heads ({sizes}); expected --attention=sdpa, or one that divides them"
        )
    if c.attention == "blocks" and c.dropout > 0:
        yield f"attention=blocks has no dropout (dropout={c.dropout}); expected --dropout=0, or --attention=auto"
    if c.min_lr > c.learning_rate:
        yield f"min_lr={c.min_lr} is above learning_rate={c.learning_rate}; expected no more, such as a tenth of it"
    if not re.fullmatch(r"none|sqrt|selective|every:[1-9][0-9]*", c.checkpointing):
        yield f"checkpointing={c.checkpointing}: expected none, sqrt, selective or every:K, such as every:1"
    if c.checkpointing == "selective" and c.compiles_blocks:
        yield (
            "checkpointing=selective chooses among the operators of a block, which are hidden once blocks are compiled "
            f"one by one (compile_scope={c.compile_scope}, shard={c.shard}, tensor_parallel={c.tensor_parallel}, "
            f"pipeline_parallel={c.pipeline_parallel}); expected --checkpointing=every:1, or --compile=False"
        )
    if replays_graphs(c) and overwrites_graphs(c):
        yield (
            f"compile_mode={c.compile_mode} replays CUDA graphs, which overwrite their memory in the next forward and "
            "hold no collectives; expected --compile_mode=default, or --micro_batch_size=0 --set_to_none=True "
            "--shard=none --tensor_parallel=1 --pipeline_parallel=1 --optimizer_in_backward=False, and "
            "--compile_scope=model or --checkpointing=none"
        )
    if c.optimizer_in_backward and (accumulates(c) or c.grad_clip or c.dtype == "float16"):
        yield (
            "optimizer_in_backward=True uses each gradient once it is ready, before there is a sum over micro-batches, "
            f"a global norm or a check for overflow (micro_batch_size={c.micro_batch_size}, grad_clip={c.grad_clip}, "
            f"dtype={c.dtype}); expected --micro_batch_size=0 --grad_clip=0 and no float16"
        )
    if c.optimizer in ("adafactor", "galore") and c.shard != "none":
        yield (
            f"optimizer={c.optimizer} needs whole matrices, and shard={c.shard} leaves each process a part of them; "
            "expected --shard=none, or --optimizer=adamw8bit"
        )


def impossible_recipes(c):
    """Yields a line for each combination of the recipe's values that cannot work."""
    if c.tied and (c.embedding_lr != 1 or c.head_lr != 1):
        yield f"embedding_lr={c.embedding_lr}, head_lr={c.head_lr} with tied=True, one weight; expected --tied=False"
    if c.optimizer_in_backward and (c.decay == "cautious" or c.average != "none"):
        yield (
            f"decay={c.decay}, average={c.average} act after the update of all weights, and optimizer_in_backward=True "
            "updates one by one; expected --optimizer_in_backward=False, or --decay=decoupled --average=none"
        )
    if c.position == "rotary" and c.n_embd // c.n_head % 2:
        yield (
            f"position=rotary rotates pairs of channels, and n_embd={c.n_embd} has an odd number for each of "
            f"n_head={c.n_head} heads; expected an even one"
        )


def gathers_keys(config):
    """True if context parallelism gathers keys and values: if its processes do not divide the heads that each has."""
    return config.n_head // config.tensor_parallel % config.context_parallel > 0


def count_pieces(c):
    """Number of pieces, of equal length, into which the processes of a group cut a sequence."""
    return c.context_parallel * (1 + gathers_keys(c)) * c.tensor_parallel


def accumulates(c):
    """True if the gradients of several micro-batches add up to those of a step."""
    return c.micro_batch_size == "auto" or 0 < c.micro_batch_size < c.batch_size


def replays_graphs(c):
    """True if torch.compile records CUDA graphs, which reuse the same memory in every forward pass."""
    return c.compile and c.compile_mode in ("reduce-overhead", "max-autotune")


def overwrites_graphs(c):
    """True if a step needs, or moves, memory that a CUDA graph of the model overwrites or has at fixed addresses."""
    recomputes_blocks = c.compile_scope == "block" and c.checkpointing != "none"
    moves = c.optimizer_in_backward or c.shard != "none" or c.tensor_parallel > 1 or c.pipeline_parallel > 1
    return accumulates(c) or not c.set_to_none or recomputes_blocks or moves
