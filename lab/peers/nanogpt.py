"""nanoGPT: its own train.py, executed from a checkout, on a data folder in its format.

Nothing in the checkout is changed. Two names are given to the script from outside: its `print`, which tells the end of
a step, and torch.randint, with which it draws the places of a batch.
"""

import os
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import torch

from nanoladder.checkpoint.interop import COMPILED, GPT2_VOCABULARY, HEAD, PREFIX, gpt2_name
from nanoladder.errors import BadInput

SAME = ("batch_size", "n_layer", "n_head", "n_embd", "dropout", "bias")  # keys that have the same name there
SAME += ("learning_rate", "weight_decay", "beta1", "beta2", "grad_clip")


class Finished(Exception):
    """Ends the script when the clock says so."""


def train(task):
    """Runs train.py until the clock ends it. Returns the setting in words.

    Raises BadInput without a checkout, for data that its format cannot hold, and for a script that is not nanoGPT's.
    """
    if not task.checkout:
        raise BadInput("needs a checkout: --nanogpt=PATH")
    dtype = "float32" if task.device.type == "cpu" else task.dtype  # on a CPU it has no autocast
    words, path = [f"--compile={task.best}", f"--dtype={dtype}"], Path(task.checkout, "train.py").resolve()
    namespace = {"__name__": "__main__", "__file__": str(path)}

    def report(text="", *_, **__):
        step = re.match(r"iter \d+: loss ([^\s,]+)", str(text))
        if step and task.clock.step(float(step[1])):
            raise Finished

    namespace["print"], places = report, batch_places(task, namespace, write_data(task))
    torch.randint = lambda *_, **__: next(places)
    sys.argv = [path.name, *words, *flags(task)]
    sys.path.insert(0, str(path.parent))
    sys.dont_write_bytecode = True
    sys.modules.pop("model", None)  # ours; its own has the same name
    os.chdir(path.parent)
    task.clock.start()
    try:
        exec(compile(path.read_text(encoding="utf-8"), path, "exec"), namespace)
    except Finished:
        return " ".join(words)
    raise BadInput(f"{path} ended before it had taken {task.clock.last} steps; expected nanoGPT's train.py")


def flags(task):
    """The words of its command line. It evaluates before the first step, on no batches here, and never saves."""
    config, folder = task.naive, task.folder.resolve()
    keys = {key: getattr(config, key) for key in SAME} | {"block_size": config.context_length}
    keys |= {"dataset": folder, "out_dir": folder, "device": task.device.type, "gradient_accumulation_steps": 1}
    keys |= {"max_iters": config.max_steps, "eval_interval": config.max_steps, "eval_iters": 0, "decay_lr": False}
    keys |= {"always_save_checkpoint": False, "log_interval": 1}
    return [f"--{key}={value}" for key, value in keys.items()]


def write_data(task):
    """Writes train.bin: the sequences of the first steps one after the other, each with its last target.

    meta.pkl holds the size of the vocabulary, unless it is GPT-2's, which nanoGPT knows and pads. Returns their number.
    """
    vocab_size = task.naive.vocab_size
    if task.split.documents or vocab_size > 2**16:
        raise BadInput("nanoGPT reads one stream of tokens of 16 bits, no separate documents or larger vocabularies")
    batches = [task.batches[step] for step in range(1, 1 + task.clock.last)]
    rows = torch.cat([torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1) for batch in batches])
    rows.numpy().astype(np.uint16).tofile(task.folder / "train.bin")
    if vocab_size != GPT2_VOCABULARY:
        (task.folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))
    return len(rows)


def batch_places(task, namespace, n_sequences):
    """Yields the places of the sequences of one step after the other in train.bin, then again from the first.

    The script draws first when its model is built and no step is taken: then the model gets the task's weights. Rows
    that pad its vocabulary become zero.
    """
    theirs = {name.removeprefix(COMPILED): weight for name, weight in namespace["model"].state_dict().items()}
    for name, weight in task.model().state_dict().items():
        name = HEAD if name == "head.weight" else PREFIX + gpt2_name(name)
        if name in theirs:
            theirs[name].zero_()[: len(weight)].copy_(weight)
    places = torch.arange(n_sequences) * (task.naive.context_length + 1)
    while True:
        yield from places.split(task.naive.batch_size)
