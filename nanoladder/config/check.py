"""What is refused, each in one line: unknown keys, wrong types, values out of range or that cannot work together."""

import dataclasses
import difflib
import math
import re
from typing import Literal, get_args, get_origin

from nanoladder.config.expressions import LONGEST_TEXT, short
from nanoladder.config.keys import DEFAULTS, PLACES, TYPES, WORDS
from nanoladder.errors import BadInput


def known(key, where):
    if key not in DEFAULTS:
        raise BadInput(f"{where}: unknown key {short(repr(key))}{nearest(key, DEFAULTS)}; --help lists every key")


def nearest(name, names):
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def typed(key, value, where):
    """The value, an int turned into a float where one is expected; BadInput if the type is wrong."""
    kind = TYPES[key]
    if value in WORDS.get(key, ()):  # in the place of a number
        return value
    if kind is float and type(value) is int and abs(value) < 2**1023:
        value = float(value)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            text = short(str(value))
            raise BadInput(f"{where}: {key}={text}: expected {expected(key)}{nearest(text, get_args(kind))}")
    elif type(value) is not kind or (kind is float and not math.isfinite(value)) or (key in PLACES and not value):
        raise BadInput(f"{where}: {key}={short(repr(value))}: expected {expected(key)}, such as {key}={DEFAULTS[key]}")
    elif kind is str and not (value.isprintable() and len(value) <= LONGEST_TEXT):
        raise BadInput(f"{where}: {key}={short(repr(value))}: expected at most {LONGEST_TEXT} printable characters")
    return value


def expected(key):
    kind = TYPES[key]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    text = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}[kind]
    return " or ".join([text, *WORDS.get(key, ())])


def check(config):
    """Raises BadInput for values that cannot work together, before anything is loaded or written."""

    def require(condition, message):
        if not condition:
            raise BadInput(message)

    if config.micro_batch_size == "auto":
        config = dataclasses.replace(config, micro_batch_size=1)  # the smallest that it may become
    at_least_1 = "n_layer n_head n_embd context_length batch_size pad_vocab_to keep_checkpoints"
    at_least_0 = (
        "vocab_size max_steps learning_rate min_lr warmup_steps lr_decay_steps weight_decay grad_clip seed "
        "log_interval eval_interval eval_windows save_interval save_every_minutes replay_step num_workers loss_chunks "
        "micro_batch_size batch_warmup_steps memory_gb"
    )
    for key, value in dataclasses.asdict(config).items():
        within = type(value) is not int or abs(value) < 2**63
        require(within, f"{key}={short(str(value))}: expected a number of at most 64 bits, less than 2**63")
    for key in at_least_1.split():
        require(getattr(config, key) >= 1, f"{key}={getattr(config, key)}: expected at least 1")
    for key in at_least_0.split():
        require(getattr(config, key) >= 0, f"{key}={getattr(config, key)}: expected 0 or more")
    for key in ("dropout", "beta1", "beta2"):
        require(0 <= getattr(config, key) < 1, f"{key}={getattr(config, key)}: expected 0 up to, not including, 1")
    c = config
    require(
        c.n_embd % c.n_head == 0,
        f"n_embd={c.n_embd} does not divide into n_head={c.n_head} heads of equal width; "
        f"expected a multiple of n_head, such as n_embd={max(1, round(c.n_embd / c.n_head)) * c.n_head}",
    )
    if c.micro_batch_size and c.batch_size % c.micro_batch_size:
        sizes = range(max(1, c.micro_batch_size - 9999), min(c.micro_batch_size + 9999, c.batch_size) + 1)
        divisors = [size for size in sizes if c.batch_size % size == 0] or [math.gcd(c.batch_size, c.micro_batch_size)]
        less, more = c.batch_size // c.micro_batch_size * c.micro_batch_size, c.micro_batch_size
        near = sorted(divisors, key=lambda size: abs(size - c.micro_batch_size))[:2]
        raise BadInput(
            f"batch_size={c.batch_size} does not divide into micro-batches of micro_batch_size={c.micro_batch_size}; "
            f"expected micro_batch_size {' or '.join(map(str, sorted(near)))}, "
            f"or batch_size {' or '.join(str(size) for size in (less, less + more) if size)}"
        )
    require(
        not (c.compile and (c.compile_scope == "block" or c.shard != "none") and c.checkpointing == "selective"),
        "checkpointing=selective chooses among the operators of a block, which compile_scope=block hides from it, "
        "as sharding does; expected compile_scope=model and shard=none, or checkpointing=every:1",
    )
    graphs = c.compile and c.compile_mode in ("reduce-overhead", "max-autotune")
    accumulates = 0 < c.micro_batch_size < c.batch_size or not c.set_to_none
    recomputes = c.compile_scope == "block" and c.checkpointing != "none"
    require(
        not (graphs and (accumulates or recomputes or c.shard != "none")),
        f"compile_mode={c.compile_mode} replays CUDA graphs, whose memory each forward writes again: gradients that "
        "add up and blocks that are recomputed would be overwritten, and sharded weights move; expected "
        "--compile_mode=default, or --micro_batch_size=0 --set_to_none=True --compile_scope=model --shard=none",
    )
    require(
        not (c.optimizer_in_backward and (0 < c.micro_batch_size < c.batch_size or c.grad_clip)),
        "optimizer_in_backward uses each gradient as it arrives, before there is a sum over micro-batches or a global "
        "norm to clip by; expected --micro_batch_size=0 --grad_clip=0, or --optimizer_in_backward=False",
    )
    require(
        not (c.optimizer_in_backward and c.dtype == "float16"),
        "optimizer_in_backward updates before it is known whether a float16 gradient overflows somewhere; "
        "expected --dtype=bfloat16, or --optimizer_in_backward=False",
    )
    require(
        not (c.optimizer in ("adafactor", "galore") and c.shard != "none"),
        f"optimizer={c.optimizer} works on whole matrices, of which shard={c.shard} leaves each process a part; "
        "expected --shard=none, or --optimizer=adamw8bit",
    )
    require(
        re.fullmatch(r"none|sqrt|selective|every:[1-9][0-9]*", c.checkpointing),
        f"checkpointing={c.checkpointing}: expected none, sqrt, selective or every:K, such as every:1 for every block",
    )
    require(
        c.micro_batch_size or not c.batch_warmup_steps,
        f"batch_warmup_steps={c.batch_warmup_steps}: a batch grows by micro-batches, so that shapes stay; expected "
        f"micro_batch_size, such as --micro_batch_size=1, or --batch_warmup_steps=0",
    )
    require(
        c.min_lr <= c.learning_rate,
        f"min_lr={c.min_lr} is above learning_rate={c.learning_rate}; expected at most that, such as a tenth of it",
    )
