"""nanoGPT: its own train.py, executed from a checkout, on a data folder in its format.

Nothing in the checkout is changed. train(), whose steps are timed, gives the script two names from outside: its
`print`, which tells the end of a step, and torch.randint, with which it draws the places of a batch. run(), a whole
command for --mode=race, changes torch.manual_seed alone.
"""

import dataclasses
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.measure.cli import command_line
from lab.measure.launch import reason_of_exit
from lab.measure.measurements import COMPARED
from nanoladder import checkpoint
from nanoladder.checkpoint.interop import GPT2_VOCABULARY, HEAD, gpt2_name, unwrapped
from nanoladder.config import Config
from nanoladder.data import open_dataset
from nanoladder.errors import BadInput
from train import evaluate

SAME = ("batch_size", "n_layer", "n_head", "n_embd", "dropout", "bias")  # keys that have the same name there
SAME += ("learning_rate", "weight_decay", "beta1", "beta2", "grad_clip")
LAPTOP = (  # train.py's arguments in the command that its README gives for a laptop
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
    "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
STEP = re.compile(r"^iter \d+: loss ([^\s,]+), time ([\d.]+)ms", re.MULTILINE)
# The script has a fixed seed, to which this adds the first argument
SEEDED = """
import runpy, sys, torch
seed, offset = torch.manual_seed, int(sys.argv.pop(1))
torch.manual_seed = lambda number: seed(number + offset)
runpy.run_path("train.py", run_name="__main__")
"""


class Finished(Exception):
    """Ends the script when the clock says so."""


def train(task):
    """Runs train.py until the clock ends it. Returns the setting as text.

    Raises BadInput for data that its format cannot hold, and for a script that is not nanoGPT's.
    """
    dtype = "float32" if task.device.type == "cpu" else task.dtype  # on a CPU it has no autocast
    words, path = [f"--compile={task.best}", f"--dtype={dtype}"], Path(task.checkout, "train.py").resolve()
    namespace: dict = {"__name__": "__main__", "__file__": str(path)}

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
    raise BadInput(f"{path} ended before its last turn; expected nanoGPT's train.py")


def flags(task):
    """Its command line's arguments: it evaluates before the first step, here on no batches, and never saves."""
    config, folder = task.naive, task.folder.resolve()
    keys = {key: getattr(config, key) for key in SAME} | {"block_size": config.context_length}
    keys |= {"dataset": folder, "out_dir": folder, "device": task.device.type, "gradient_accumulation_steps": 1}
    keys |= {"max_iters": config.max_steps, "eval_interval": config.max_steps, "eval_iters": 0, "decay_lr": False}
    keys |= {"always_save_checkpoint": False, "log_interval": 1}
    return command_line(keys)


def write_data(task):
    """Writes train.bin: the sequences of the first steps one after the other, each with its last target.

    Returns their number.
    """
    require_stream(task.split)
    batches = [task.batches[step] for step in range(1, 1 + COMPARED)]
    rows = torch.cat([torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1) for batch in batches])
    rows.numpy().astype(np.uint16).tofile(task.folder / "train.bin")
    write_vocab_size(task.folder, task.naive.vocab_size)
    return len(rows)


def require_stream(split):
    """Raises BadInput for a split that nanoGPT's format cannot hold."""
    if split.documents or split.tokens.dtype != np.uint16:
        raise BadInput("nanoGPT reads one stream of 16-bit tokens, not separate documents or larger vocabularies")


def write_vocab_size(folder, vocab_size):
    """Writes meta.pkl with the size of the vocabulary, unless it is GPT-2's, which nanoGPT knows and pads."""
    if vocab_size != GPT2_VOCABULARY:
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))


def batch_places(task, namespace, n_sequences):
    """Yields the places of the sequences of one step after the other in train.bin, then again from the first.

    The script draws first when its model is built and no step is taken: then the model gets the task's weights. Rows
    that pad its vocabulary become zero.
    """
    weights = unwrapped(namespace["model"].state_dict())
    for name, weight in task.model().state_dict().items():
        name = HEAD if name == "head.weight" else gpt2_name(name)
        if name in weights:
            weights[name].zero_()[: len(weight)].copy_(weight)
    places = torch.arange(n_sequences) * (task.naive.context_length + 1)
    while True:
        yield from places.split(task.naive.batch_size)


# -- a whole run


def run(checkout: Path, words: list, config: Config, seed: int) -> dict:
    """Trains by nanoGPT's own command, `train.py` with these arguments, on the config's dataset, to its end.

    Returns a run as race.py has them: its seconds, the validation loss of its checkpoint in nats per token and bits
    per byte, and training losses in bits per byte, with their seconds. Raises BadInput if the command fails.
    """
    dataset = open_dataset(config)
    with tempfile.TemporaryDirectory(prefix="nanogpt-") as name:
        folder = Path(name)
        for split in (dataset.train, dataset.val):
            require_stream(split)
            (folder / split.path.name).symlink_to(split.path.resolve())
        write_vocab_size(folder, dataset.vocab_size)
        command = [sys.executable, "-c", SEEDED, str(seed), *words, f"--dataset={folder}", f"--out_dir={folder}"]
        # The checkout stays as it is, and its script finds its model.py
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": ""}
        start = time.monotonic()
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        seconds = round(time.monotonic() - start, 1)
        if done.returncode:
            raise BadInput(f"nanoGPT's train.py in {checkout} with seed {seed} failed: {reason_of_exit(done)}")
        loss = validation_loss(folder / "ckpt.pt", config)
    bits: Any = dataset.bits_per_nat  # race() requires it
    losses, times = np.array(STEP.findall(done.stdout), dtype=float).T
    at = seconds - (times.sum() - times.cumsum()) / 1e3  # its last step ends the command
    points = [[round(when, 1), bits * each] for when, each in zip(at.tolist(), losses.tolist(), strict=True)]
    return {"seconds": seconds, "loss": loss, "bpb": bits * loss, "curve": [*points, [seconds, bits * loss]]}


def validation_loss(path, config):
    """The loss of a checkpoint on the config's validation split, in windows of the model's own context, in float32."""
    model = checkpoint.load_gpt(path)
    windows = {"dataset": config.dataset, "eval_windows": config.eval_windows, "batch_size": config.batch_size}
    config = dataclasses.replace(model.config, **windows, dtype="float32")
    return evaluate(model, open_dataset(config).val, config, torch.device("cpu"))
