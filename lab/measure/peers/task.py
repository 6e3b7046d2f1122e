"""The task that every peer gets: the same weights, batches and hyperparameters, and one clock.

measure() runs the peer in the file of that name; --mode=peers calls it in a separate process for each.
"""

import dataclasses
import importlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from lab.measure.measurements import Clock
from model import GPT
from nanoladder import data, machine
from nanoladder.arithmetic import CUTS
from nanoladder.config import Config, apply
from nanoladder.config.stages import files
from nanoladder.errors import BadInput

PEERS = {  # row: the peer's file, and if it is at its best
    "nanoGPT": ("nanogpt", False),
    "nanoGPT, compiled": ("nanogpt", True),
    "nanochat, compiled": ("nanochat", True),
    "Hugging Face Trainer": ("huggingface", False),
    "Hugging Face Trainer, compiled": ("huggingface", True),
    "Lightning": ("lightning", False),
    "Lightning, compiled": ("lightning", True),
}
OTHER_MODELS = ["nanochat, compiled"]  # rows whose losses are not compared
CHECKOUTS = {  # {peer: a file of its checkout, the repository}
    "nanogpt": ("train.py", "karpathy/nanoGPT"),
    "nanochat": ("nanochat/gpt.py", "karpathy/nanochat"),
}
# {key: its only value with which every peer trains the same}
ALIKE = {"optimizer": "adamw", "dropout": 0.0, "shard": "none", **dict.fromkeys(CUTS, 1)}


def require_comparable(config: Config, checkouts: dict[str, Path | str | None]) -> None:
    """Raises BadInput for a config that peers would train differently, and for a folder that is not a checkout."""
    for key, value in ALIKE.items():
        if (given := getattr(config, key)) != value:
            raise BadInput(f"{key}={given}: not every peer supports it; expected --{key}={value}")
    for peer, folder in checkouts.items():
        if folder:
            require_checkout(peer, folder, *CHECKOUTS[peer])


def require_checkout(peer: str, folder: Path | str, file: str, repository: str) -> None:
    """Raises BadInput unless a folder is a checkout of a peer's repository, which has that file."""
    if not Path(folder, file).is_file():
        raise BadInput(f"--{peer}={folder}: no {file} there; expected a checkout of {repository}")


def measure(
    config: Config,
    turn: Callable | None = None,
    peer: str = "ours",
    best: bool = False,
    checkout: Path | str | None = None,
) -> dict:
    """Trains by the peer in the file of that name, in turns (Clock). Returns its figures.

    best: its own best settings, instead of its defaults. checkout: its path, for a peer in CHECKOUTS.
    Raises BadInput for such a peer without one.
    """
    if peer in CHECKOUTS and not checkout:
        raise BadInput(f"needs a checkout: --{peer}=PATH")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # a Trainer takes all that there are
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        task = Task(config, turn, best, folder, checkout)
        setting = importlib.import_module(f"lab.measure.peers.{peer}").train(task)
    on_gpu, figures = task.device.type == "cuda", task.clock.figures()
    figures["peak"] = torch.cuda.max_memory_allocated(task.device) if on_gpu else None
    figures["losses"] = [float(loss) for loss in task.clock.losses]
    return figures | {"tokens": config.batch_size * config.context_length, "setting": setting}


class Task:
    """A training task for a peer.

    config: as configured, at a constant learning rate; it says the dtype and the workers of a loop at its best. naive:
    the same without any optimization; the initial weights are drawn with it. best: whether the peer is to use its own
    best settings. folder: for files that it must write. checkout: of the peer's code, if it needs one.
    """

    def __init__(self, config, turn, best, folder, checkout=None):
        dataset = data.open_dataset(config)
        constant = {"min_lr": config.learning_rate, "warmup_steps": 0, "lr_decay_steps": 0, "max_steps": 1_000_000}
        self.config = dataclasses.replace(config, vocab_size=dataset.vocab_size, **constant)
        self.naive = dataclasses.replace(self.config, **apply([files()["naive"]], {}, vars(self.config)))
        self.split, self.best, self.folder, self.checkout = dataset.train, best, Path(folder), checkout
        self.device = machine.choose_device(config.device)
        self.clock = Clock(self.device, turn)
        self.batches = data.TrainingBatches(self.split, self.naive)  # [step], counted from 1
        # Name of the dtype of matrix products at the peer's best: float32, bfloat16 or float16
        self.dtype = str(machine.choose_dtype(config.dtype, self.device)).removeprefix("torch.")

    def model(self, **fields):
        """The initial model on the CPU, plain but for these fields of its config."""
        return GPT(dataclasses.replace(self.naive, **fields))

    def loader(self, **options):
        """The batches of all steps in order, read as the options of a DataLoader say."""
        return DataLoader(self.batches, None, sampler=range(1, 1 + self.naive.max_steps), **options)
