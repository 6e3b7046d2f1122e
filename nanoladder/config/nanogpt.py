"""Names of nanoGPT's train.py that are not keys here: refused in one line that says the same in keys.

    --gradient_accumulation_steps=40 --batch_size=12    is    --micro_batch_size=12 --batch_size=480

docs/from-nanogpt.md has the table, with the names that are the same in both.
"""

import ast
import contextlib

from nanoladder.config.expressions import short
from nanoladder.errors import BadInput

# nanoGPT's defaults, of these names and of those that the rules below read beside them.
DEFAULTS = {
    "max_iters": 600_000,
    "block_size": 1024,
    "gradient_accumulation_steps": 40,
    "eval_iters": 200,
    "eval_only": False,
    "always_save_checkpoint": True,
    "decay_lr": True,
    "warmup_iters": 2000,
    "lr_decay_iters": 600_000,
    "backend": "nccl",
    "wandb_log": False,
    "wandb_run_name": "gpt2",
    "batch_size": 12,
    "eval_interval": 2000,
    "learning_rate": 6e-4,
}

# {name: function of all values that returns the keys to set}. An empty dict: the default here does the same.
KEYS = {
    "max_iters": lambda v: {"max_steps": v["max_iters"]},
    "block_size": lambda v: {"context_length": v["block_size"]},
    "gradient_accumulation_steps": lambda v: {
        "micro_batch_size": v["batch_size"],
        "batch_size": v["batch_size"] * v["gradient_accumulation_steps"],
    },
    "eval_iters": lambda v: {"eval_windows": v["eval_iters"] * v["batch_size"]},
    "always_save_checkpoint": lambda v: {"save_interval": v["eval_interval"]} if v["always_save_checkpoint"] else {},
    "decay_lr": lambda v: {} if v["decay_lr"] else {"warmup_steps": 0, "min_lr": v["learning_rate"]},
    "warmup_iters": lambda v: {"warmup_steps": v["warmup_iters"] if v["decay_lr"] else 0},
    "lr_decay_iters": lambda v: {"lr_decay_steps": v["lr_decay_iters"]},
    "wandb_log": lambda v: {"track": "wandb"} if v["wandb_log"] else {},
}

# {name: what takes its place}, of names that no key replaces.
INSTEAD = {
    "eval_only": "`python evaluate.py` evaluates",
    "backend": "nccl is chosen on GPUs, gloo on CPUs",
    "wandb_run_name": "the run is named after out_dir",
}
NAMES = {*KEYS, *INSTEAD}


def refuse(given, where):
    """Raises BadInput for the names of nanoGPT's among {name: value} of a command line or of a config file.

    Values may be text, as on a command line. Of names that are not given, nanoGPT's defaults count.
    """
    names = [name for name in given if name in NAMES]
    values = DEFAULTS | {name: typed(name, value, where) for name, value in given.items() if name in DEFAULTS}
    keys, useless = {}, []
    for name in names:
        if name in INSTEAD:
            useless.append(f"{name} ({INSTEAD[name]})")
        elif same := KEYS[name](values):
            keys |= same
        else:
            useless.append(f"{name}={values[name]} (the default here)")
    form, comma = ("--{}={}", " ") if where == "command line" else ("{} = {!r}", ", ")
    change = [f"write {comma.join(form.format(*pair) for pair in keys.items())}"] if keys else []
    change += [f"leave out {', '.join(useless)}"] if useless else []
    belong = "belongs" if len(names) == 1 else "belong"
    raise BadInput(
        f"{where}: {', '.join(names)} {belong} to nanoGPT; here, {'; '.join(change)}; see docs/from-nanogpt.md"
    )


def typed(name, value, where):
    """Returns the value as the type of nanoGPT's default, or raises BadInput."""
    kind = type(DEFAULTS[name])
    if isinstance(value, str) and kind is not str:
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(value)
    if type(value) is not kind and not (kind is float and type(value) is int):
        text = "no value" if value is None else f"{name}={short(str(value))}"
        raise BadInput(f"{where}: {name} belongs to nanoGPT; {text}: expected one such as {name}={DEFAULTS[name]}")
    return value
