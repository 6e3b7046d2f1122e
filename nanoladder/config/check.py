"""Checks of keys and values: the name exists, the type is right, the value is in range, the combination can work.

Every refusal is one line: the key, its value, what was expected and what to do.
"""

import dataclasses
import math
import re
from collections import ChainMap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from nanoladder import files
from nanoladder.config.keys import DEFAULTS, INSTEAD, OPTIONS, PATHS, REMOVED, TYPES, WORDS, Config
from nanoladder.errors import BadInput, nearest

# Ranges of numbers; all others are at least 0.
AT_LEAST_1 = ("n_layer", "n_head", "n_embd", "context_length", "batch_size", "pad_vocab_to")
AT_LEAST_1 += ("tensor_parallel", "context_parallel", "pipeline_parallel")
BELOW_1 = ("dropout", "beta1", "beta2")
# Values that optimizer_in_backward requires.
IN_BACKWARD = {"micro_batch_size": 0, "grad_clip": 0.0}


# -- names and types


def check_names(keys: Iterable[str], where: Path | str, options: Iterable[str] = ()) -> None:
    """Raises BadInput, one line for all of the keys that do not exist.

    The line has the replacement of each, or the nearest of the keys and `options`, the script's own options. keys: an
    iterable, or {key: its line}.
    """
    lines = keys if isinstance(keys, dict) else dict.fromkeys(keys)
    wrong = [key for key in lines if key not in DEFAULTS]
    plain = {key.replace("-", "_") for key in wrong}
    pages = "".join(f"{page} compares all; " for page, names in INSTEAD.items() if plain & names.keys())
    pages += "--help lists every key"
    if len(wrong) == 1:
        where = f"{where} {lines[wrong[0]] or ''}".rstrip()
        raise BadInput(f"{where}: unknown key {wrong[0]!r}{advice(wrong[0], options)}; {pages}")
    if wrong:
        descriptions = [repr(key) + (f" ({lines[key]})" if lines[key] else "") + advice(key, options) for key in wrong]
        raise BadInput(f"{where}: unknown keys {'; '.join(descriptions)}; {pages}")


def of_earlier(saved: dict[str, Any], where: Path | str) -> dict[str, Any]:
    """Returns a run's saved {key: value} without keys that are gone, and were at the value that is left.

    Raises BadInput, as check_names() does, for other keys that do not exist.
    """
    keys = {key: value for key, value in saved.items() if key not in REMOVED or value != REMOVED[key]}
    check_names(keys.keys(), where)
    return keys


def advice(key, options=()):
    """Returns the replacement of an unknown key, or a question that suggests the nearest one."""
    elsewhere = ChainMap(OPTIONS, *INSTEAD.values()).get(key.replace("-", "_"))
    return f", expected {elsewhere}" if elsewhere else nearest(key, [*DEFAULTS, *options])


def typed(key: str, value: Any, where: str) -> Any:
    """Returns the value as the key's type. Raises BadInput if it has another type.

    An int becomes a float if the key takes one, and ~ at the start of a path the home folder.
    """
    kind = TYPES[key]
    if value in WORDS.get(key, ()):  # a word that the key accepts instead of a number
        return value
    if kind is float and type(value) is int:
        value = float(value)
    fits = value in get_args(kind) if get_origin(kind) is Literal else type(value) is kind
    if kind is str and fits and "\0" in value:  # no path has one
        raise BadInput(f"{where}: {key}={value!r}: it has a NUL byte; expected text without one")
    if kind is str and fits and re.search("[\ud800-\udfff]", value):  # Python's stand-ins for undecodable bytes
        raise BadInput(f"{where}: {key}={value!r}: it is not UTF-8; expected a name in UTF-8, for reports and plots")
    if not fits or (kind is float and not math.isfinite(value)) or (value == "" and DEFAULTS[key]):
        advice = f", such as {key}={DEFAULTS[key]}"
        if get_origin(kind) is Literal:
            advice = nearest(str(value), get_args(kind))
        raise BadInput(f"{where}: {key}={value!r}: expected {expected(key)}{advice}")
    return files.expand(value) if key in PATHS else value


def expected(key):
    """Describes the values that a key accepts."""
    kind = TYPES[key]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    text = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}[kind]
    return " or ".join([text, *WORDS.get(key, ())])


# -- ranges and combinations


def check(config: Config) -> None:
    """Raises BadInput for values that are out of range or cannot be combined, before anything is loaded or written."""
    for key, value in vars(config).items():
        if TYPES[key] in (int, float) and value not in WORDS.get(key, ()):
            least = 1 if key in AT_LEAST_1 else 0
            end = 1 if key in BELOW_1 else 2**63 if type(value) is int else math.inf  # 64 bits
            if not least <= value < end:
                raise BadInput(f"{key}={value}: expected at least {least}, and below {end}")
    for keys, text in impossible(config):
        raise BadInput(", ".join(f"{key}={getattr(config, key)}" for key in keys.split()) + f": {text}")


def impossible(c):
    """Yields (keys, text) for each combination of keys whose values cannot work; text: why, and what was expected."""
    heads = "n_head tensor_parallel context_parallel"
    if c.n_embd % c.n_head:
        yield "n_embd n_head", "expected n_embd to be a multiple of n_head"
    if c.micro_batch_size not in (0, "auto") and c.batch_size % c.micro_batch_size:
        yield "batch_size micro_batch_size", "expected micro_batch_size to be a divisor of batch_size, or auto"
    if c.n_head % c.tensor_parallel:
        yield "n_head tensor_parallel", "expected tensor_parallel to be a divisor of n_head"
    if c.context_length % (n := c.context_parallel * (1 + gathers_keys(c)) * c.tensor_parallel):
        yield f"context_length {heads}", f"sequences divide into {n} pieces; expected a multiple of {n} tokens"
    if gathers_keys(c) and c.attention in ("matmul", "blocks", "cudnn"):
        why = "it needs as many queries as keys, but where heads do not divide among processes, each gathers all keys"
        yield f"attention {heads}", f"{why}; expected --attention=sdpa, or heads that do divide"
    if c.attention == "blocks" and c.dropout > 0:
        yield "attention dropout", "attention in blocks has no dropout; expected --dropout=0, or --attention=auto"
    if c.min_lr > c.learning_rate:
        yield "min_lr learning_rate", "expected min_lr to be at most learning_rate, such as a tenth of it"
    if not re.fullmatch(r"none|sqrt|selective|every:[1-9][0-9]*", c.activation_checkpointing):
        yield "activation_checkpointing", "expected none, sqrt, selective or every:K, such as every:1"
    if c.activation_checkpointing == "selective" and c.compiles_blocks:
        keys = "activation_checkpointing optimizer_in_backward shard tensor_parallel pipeline_parallel"
        why = "it chooses which operators to recompute, and compiled blocks hide them"
        yield keys, f"{why}; expected --activation_checkpointing=every:1, or --compile=False"
    if c.float8 and c.tensor_parallel > 1:
        yield "float8 tensor_parallel", "a matrix has one scale, and no process has all of it; expected --float8=False"
    if c.float8 and (c.n_embd % 16 or c.context_length // c.context_parallel % 16):
        why = "tensor cores read float8 in rows of 16 numbers"
        expected = "expected n_embd and the tokens of a sequence, in each process, to be multiples of 16"
        yield "float8 n_embd context_length context_parallel", f"{why}; {expected}"
    if c.optimizer_in_backward and (changes := differing(c, IN_BACKWARD)):
        why = "each weight is updated, and its gradient freed, before the others are ready"
        advice = f"expected --optimizer_in_backward=False, or {as_options(changes)}"
        yield f"optimizer_in_backward {' '.join(changes)}", f"{why}; {advice}"
    if c.optimizer_in_backward and c.dtype == "float16":
        why = "gradients are used before all of them have been checked for overflow"
        yield "optimizer_in_backward dtype", f"{why}; expected --dtype=float32, or --optimizer_in_backward=False"
    if c.optimizer in ("adafactor", "galore") and c.shard != "none":
        yield "optimizer shard", "it needs whole matrices; expected --shard=none, or --optimizer=adamw8bit"
    if c.tie_embeddings and c.head_lr != 1:
        yield "tie_embeddings head_lr", "the head shares the embedding's weight; expected --embedding_lr for both"
    if c.position == "rotary" and c.n_embd // c.n_head % 2:
        yield "position n_embd n_head", "it rotates pairs of channels; expected n_embd / n_head to be even"


def differing(config, needed):
    """Returns the items of `needed`, {key: value}, that differ in the config. A micro-batch of a whole batch is 0."""
    if config.micro_batch_size == config.batch_size:
        config = dataclasses.replace(config, micro_batch_size=0)
    return {key: value for key, value in needed.items() if getattr(config, key) != value}


def as_options(values):
    """Formats {key: value} as command-line options."""
    return " ".join(f"--{key}={value}" for key, value in values.items())


def gathers_keys(config: Config) -> bool:
    """True if context parallelism gathers keys and values: a process's heads are not a multiple of context_parallel."""
    return config.n_head // config.tensor_parallel % config.context_parallel > 0
