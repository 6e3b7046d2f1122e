"""Checks of keys and values: a name that exists, the right type, a value in range, a combination that can work.

Every refusal is one line that says which key, its value, what was expected and what to do.
"""

import math
import re
from typing import Literal, get_args, get_origin

from nanoladder.config.keys import DEFAULTS, INSTEAD, NOT_EMPTY, TYPES, WORDS
from nanoladder.errors import BadInput, nearest

# Ranges of the numbers; every other number is 0 or more.
AT_LEAST_1 = ("n_layer", "n_head", "n_embd", "context_length", "batch_size", "pad_vocab_to", "keep_checkpoints")
AT_LEAST_1 += ("tensor_parallel", "context_parallel", "pipeline_parallel")
BELOW_1 = ("dropout", "beta1", "beta2")
LONGEST_TEXT = 1000  # characters in a value
GPT2 = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # OpenAI's models, as nanoGPT and the hub name them


# -- names and types


def known(key, where, options=()):
    """Raises BadInput if there is no such key; names the nearest among the keys and `options`, a script's own."""
    if key in INSTEAD:
        raise BadInput(f"{where}: {key} is no key here; expected {INSTEAD[key]} (docs/from-nanogpt.md)")
    if key not in DEFAULTS:
        question = nearest(key, [*DEFAULTS, *options])
        raise BadInput(f"{where}: unknown key {short(repr(key))}{question}; --help lists every key")


def typed(key, value, where):
    """Returns the value as the key's type: an int becomes a float if the key takes one. Raises BadInput otherwise."""
    kind = TYPES[key]
    if value in WORDS.get(key, ()):  # a word that the key takes in place of a number
        return value
    if kind is float and type(value) is int and abs(value) < 2**1023:
        value = float(value)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            text = short(str(value))
            raise BadInput(f"{where}: {key}={text}: expected {expected(key)}{nearest(text, get_args(kind))}")
    elif type(value) is not kind or (kind is float and not math.isfinite(value)) or (key in NOT_EMPTY and not value):
        raise BadInput(f"{where}: {key}={short(repr(value))}: expected {expected(key)}, such as {key}={DEFAULTS[key]}")
    elif kind is str and not (value.isprintable() and len(value) <= LONGEST_TEXT):
        raise BadInput(f"{where}: {key}={short(repr(value))}: expected at most {LONGEST_TEXT} printable characters")
    return value


def expected(key):
    """The values that a key takes, in words."""
    kind = TYPES[key]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    text = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}[kind]
    return " or ".join([text, *WORDS.get(key, ())])


def short(text):
    """Cuts text to 80 characters for a message."""
    return text if len(text) <= 80 else text[:77] + "..."


# -- ranges and combinations


def check(config):
    """Raises BadInput for values out of range or that cannot work together, before anything is loaded or written."""
    for key, value in vars(config).items():
        if TYPES[key] in (int, float) and value not in WORDS.get(key, ()):
            check_range(key, value)
    shown = {key: short(str(value)) for key, value in vars(config).items()}
    for impossible, message in COMBINATIONS:
        if impossible(config):
            raise BadInput(message.format_map(shown | {"pieces": count_pieces(config)}))


def check_range(key, value):
    if key in AT_LEAST_1:
        within, text = value >= 1, "at least 1"
    elif key in BELOW_1:
        within, text = 0 <= value < 1, "0 up to, not including, 1"
    else:
        within, text = value >= 0, "0 or more"
    if type(value) is int and value >= 2**63:
        within, text = False, "a number less than 2**63, which fits 64 bits"
    if not within:
        raise BadInput(f"{key}={short(str(value))}: expected {text}")


def accumulates(c):
    """True if the gradients of several micro-batches add up to those of a step."""
    return c.micro_batch_size == "auto" or 0 < c.micro_batch_size < c.batch_size


def replays_graphs(c):
    """True if torch.compile records CUDA graphs, which reuse the same memory in every forward pass."""
    return c.compile and c.compile_mode in ("reduce-overhead", "max-autotune")


def compiles_blocks(c):
    """True if train.py compiles the blocks one by one. The processes of a pipeline, which are several, do so too."""
    return c.compile and (c.compile_scope == "block" or c.shard != "none" or c.tensor_parallel > 1)


def gathers_keys(config):
    """True if context parallelism gathers keys and values: if its processes do not divide the heads that each has."""
    return config.n_head // config.tensor_parallel % config.context_parallel > 0


def count_frozen_blocks(c):
    """Number of blocks, from the lowest up, whose weights freeze=blocks:K keeps; else 0."""
    return int(c.freeze.removeprefix("blocks:")) if c.freeze.startswith("blocks:") else 0


def count_pieces(c):
    """Number of pieces, of equal length, into which the processes of a group cut a sequence."""
    return c.context_parallel * (1 + gathers_keys(c)) * c.tensor_parallel


# (condition on the config, message with {key} for its values)
COMBINATIONS = [
    (
        lambda c: c.n_embd % c.n_head,
        "n_embd={n_embd} does not divide into n_head={n_head} heads of equal width; expected a multiple of n_head",
    ),
    (
        lambda c: c.micro_batch_size not in (0, "auto") and c.batch_size % c.micro_batch_size,
        "batch_size={batch_size} does not divide into micro-batches of micro_batch_size={micro_batch_size}; expected "
        "a divisor of batch_size, or --micro_batch_size=auto",
    ),
    (
        lambda c: c.n_head % c.tensor_parallel,
        "n_head={n_head} does not divide among the processes of tensor_parallel={tensor_parallel}, each of which has "
        "whole heads; expected tensor_parallel to be a divisor of n_head",
    ),
    (
        lambda c: c.context_length % count_pieces(c),
        "context_length={context_length} does not divide into {pieces} pieces, by context_parallel={context_parallel}, "
        "tensor_parallel={tensor_parallel} and n_head={n_head}; expected a multiple of {pieces}",
    ),
    (
        lambda c: gathers_keys(c) and c.attention in ("matmul", "blocks", "cudnn"),
        "attention={attention} takes as many queries as keys, and context_parallel={context_parallel} gathers more "
        "keys, as it does not divide a process's heads (n_head={n_head}, tensor_parallel={tensor_parallel}); "
        "expected --attention=sdpa, or a context_parallel that divides them",
    ),
    (
        lambda c: c.attention == "blocks" and c.dropout > 0,
        "attention=blocks has no dropout (dropout={dropout}); expected --dropout=0, or --attention=auto",
    ),
    (
        lambda c: c.min_lr > c.learning_rate,
        "min_lr={min_lr} is above learning_rate={learning_rate}; expected at most that, such as a tenth of it",
    ),
    (
        lambda c: not re.fullmatch(r"none|sqrt|selective|every:[1-9][0-9]*", c.checkpointing),
        "checkpointing={checkpointing}: expected none, sqrt, selective or every:K, such as every:1 for every block",
    ),
    (
        lambda c: not re.fullmatch(r"none|embeddings|blocks:[1-9][0-9]{0,9}", c.freeze),
        "freeze={freeze}: expected none, embeddings or blocks:K, such as blocks:1 for the embeddings and one block",
    ),
    (
        lambda c: c.freeze.startswith("blocks:") and count_frozen_blocks(c) > c.n_layer,
        "freeze={freeze} freezes more blocks than n_layer={n_layer}; expected at most --freeze=blocks:{n_layer}",
    ),
    (
        lambda c: c.freeze != "none" and c.pipeline_parallel > 1,
        "freeze={freeze} would leave the first processes of pipeline_parallel={pipeline_parallel} without a gradient; "
        "expected --pipeline_parallel=1, or --freeze=none",
    ),
    (
        lambda c: c.checkpointing == "selective" and (compiles_blocks(c) or (c.compile and c.pipeline_parallel > 1)),
        "checkpointing=selective chooses among the operators of a block, which are hidden once blocks are compiled "
        "one by one (compile_scope={compile_scope}, shard={shard}, tensor_parallel={tensor_parallel}, "
        "pipeline_parallel={pipeline_parallel}); expected --checkpointing=every:1, or --compile=False",
    ),
    (
        lambda c: replays_graphs(c) and (accumulates(c) or not c.set_to_none),
        "compile_mode={compile_mode} replays CUDA graphs, whose memory the next forward pass overwrites, so gradients "
        "cannot add up (micro_batch_size={micro_batch_size}, set_to_none={set_to_none}); expected "
        "--compile_mode=default, or --micro_batch_size=0 --set_to_none=True",
    ),
    (
        lambda c: replays_graphs(c) and (c.optimizer_in_backward or c.shard != "none" or c.tensor_parallel > 1),
        "compile_mode={compile_mode} replays CUDA graphs, which need fixed addresses and hold no collectives "
        "(optimizer_in_backward={optimizer_in_backward}, shard={shard}, tensor_parallel={tensor_parallel}); expected "
        "--compile_mode=default, or --optimizer_in_backward=False --shard=none --tensor_parallel=1",
    ),
    (
        lambda c: replays_graphs(c) and c.compile_scope == "block" and c.checkpointing != "none",
        "compile_mode={compile_mode} replays CUDA graphs, whose memory is overwritten as compile_scope=block and "
        "checkpointing={checkpointing} recompute a block; expected --compile_mode=default, --compile_scope=model or "
        "--checkpointing=none",
    ),
    (
        lambda c: c.optimizer_in_backward and (accumulates(c) or c.grad_clip),
        "optimizer_in_backward=True uses each gradient once it is ready, before there is a sum over micro-batches or "
        "a global norm (micro_batch_size={micro_batch_size}, grad_clip={grad_clip}); expected "
        "--micro_batch_size=0 --grad_clip=0, or --optimizer_in_backward=False",
    ),
    (
        lambda c: c.optimizer_in_backward and c.dtype == "float16",
        "optimizer_in_backward=True updates weights before it is known if a dtype=float16 gradient overflows; "
        "expected --dtype=bfloat16, or --optimizer_in_backward=False",
    ),
    (
        lambda c: c.optimizer in ("adafactor", "galore") and c.shard != "none",
        "optimizer={optimizer} needs whole matrices, and shard={shard} leaves each process only a part of them; "
        "expected --shard=none, or --optimizer=adamw8bit",
    ),
]
