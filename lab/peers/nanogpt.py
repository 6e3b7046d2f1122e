"""nanoGPT: its own train.py, executed from a checkout, on a data folder in its format.

Nothing in the checkout is changed. Two names are given to the script from outside: its `print`, which tells the end of
a step, and torch.randint, with which it draws the places of a batch. The first draw comes when its model is built and
no step is taken: then the model gets the task's weights.
"""

import os
import pickle
import re
import sys
from itertools import cycle
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from nanoladder.checkpoint.gpt2 import HEAD, PREFIX, gpt2_name
from nanoladder.checkpoint.nanogpt import COMPILED, GPT2_VOCABULARY
from nanoladder.errors import BadInput

STEP = re.compile(r"iter \d+: loss ([^\s,]+)")


class Finished(Exception):
    """Ends the script when the clock says so."""


def train(task, checkout):
    """Runs train.py until the clock ends it. Returns the setting in words and the dtype.

    Raises BadInput for data that its format cannot hold, or a script that does not do what nanoGPT's does.
    """
    # On a CPU it has no autocast: its dtype does not act.
    dtype = "float32" if task.device.type == "cpu" else task.dtype
    words = [f"--compile={task.best}", f"--dtype={dtype}"]
    write_data(task)
    script = Path(checkout, "train.py").resolve()
    sys.argv = [script.name, *words, *flags(task)]
    sys.path.insert(0, str(script.parent))
    sys.dont_write_bytecode = True
    sys.modules.pop("model", None)  # ours; its own has the same name
    os.chdir(script.parent)
    namespace = {"__name__": "__main__", "__file__": str(script)}
    namespace["print"] = lambda text="", *_, **__: report(str(text), task.clock)
    task.clock.start()
    try:
        with mock.patch("torch.randint", Draws(task, namespace)):
            exec(compile(script.read_text(encoding="utf-8"), script, "exec"), namespace)
    except Finished:
        return " ".join(words), dtype
    raise BadInput(
        f"{script} ended before it had taken {len(task.clock.losses) + 1} steps; expected nanoGPT's train.py"
    )


def report(text, clock):
    """Tells the clock of the end of a step if a printed line says so."""
    if (found := STEP.match(text)) and clock.step(float(found[1])):
        raise Finished


def flags(task):
    """The words of its command line. It evaluates before the first step, on no batches here, and never saves."""
    config = task.naive
    keys = {
        "dataset": task.folder.resolve(),
        "out_dir": task.folder.resolve(),
        "device": task.device.type,
        "gradient_accumulation_steps": 1,
        "block_size": config.context_length,
        **{key: getattr(config, key) for key in ("batch_size", "n_layer", "n_head", "n_embd", "dropout", "bias")},
        **{key: getattr(config, key) for key in ("learning_rate", "weight_decay", "beta1", "beta2", "grad_clip")},
        "decay_lr": False,
        "max_iters": config.max_steps,
        "eval_interval": config.max_steps,
        "eval_iters": 0,
        "always_save_checkpoint": False,
        "log_interval": 1,
    }
    return [f"--{key}={value}" for key, value in keys.items()]


def write_data(task):
    """Writes train.bin: the sequences of the first steps one after the other, each with its last target.

    meta.pkl holds the size of the vocabulary, unless it is GPT-2's, which nanoGPT knows and pads.
    """
    config, rows = task.naive, []
    if task.batches.split.documents:
        raise BadInput("nanoGPT reads one stream of tokens, no separate documents")
    if config.vocab_size > 2**16:
        raise BadInput(f"nanoGPT's token files have 16 bits: too few for a vocabulary of {config.vocab_size}")
    for step in range(1, 1 + task.clock.warmup + task.clock.steps):
        batch = task.batches[step]
        rows.append(torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1).numpy().astype(np.uint16))
    np.concatenate(rows).tofile(task.folder / "train.bin")
    if config.vocab_size != GPT2_VOCABULARY:
        (task.folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": config.vocab_size}))


class Draws:
    """Stands in for torch.randint: the places of the sequences of one step after the other, then again from the first.

    The first draw gives the model, which is built by then, the task's weights.
    """

    def __init__(self, task, namespace):
        self.task, self.namespace, self.loaded = task, namespace, False
        length = task.naive.context_length + 1
        size, n_steps = task.naive.batch_size, task.clock.warmup + task.clock.steps
        places = torch.arange(n_steps * size) * length
        self.places = cycle(places.split(size))

    def __call__(self, *_, **__):
        if not self.loaded:
            load_weights(self.namespace["model"], self.task.model())
            self.loaded = True
        return next(self.places)


def load_weights(model, ours):
    """Copies weights into nanoGPT's model, whose vocabulary may have more rows: they become zero."""
    theirs = {name.removeprefix(COMPILED): parameter for name, parameter in model.state_dict().items()}
    for name, weight in ours.state_dict().items():
        name = HEAD if name == "head.weight" else PREFIX + gpt2_name(name)
        if name in theirs:
            theirs[name].zero_()[: len(weight)].copy_(weight)
