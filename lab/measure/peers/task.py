"""The task that every peer gets: the same weights, batches and hyperparameters, and one clock.

measure() runs the peer in the file of that name; --mode=peers calls it in a separate process for each.
"""

import dataclasses
import importlib
import os
import tempfile
import warnings
from pathlib import Path
from time import perf_counter

import torch
from torch.utils.data import DataLoader

from lab.measure.measurements import WARMUP, WINDOW, resident_before, resident_bytes
from model import GPT
from nanoladder import data, machine
from nanoladder.arithmetic import CUTS
from nanoladder.config import apply
from nanoladder.config.stages import files
from nanoladder.errors import BadInput
from nanoladder.run.clock import synchronized_time

PEERS = {  # row: the peer's file, and if it is at its best
    "nanoGPT": ("nanogpt", False),
    "nanoGPT, compiled": ("nanogpt", True),
    "Hugging Face Trainer": ("huggingface", False),
    "Hugging Face Trainer, compiled": ("huggingface", True),
    "Lightning": ("lightning", False),
    "Lightning, compiled": ("lightning", True),
}
# {key: its only value with which every peer trains the same}
ALIKE = {"optimizer": "adamw", "dropout": 0.0, "shard": "none", **dict.fromkeys(CUTS, 1)}


def require_comparable(config, nanogpt):
    """Raises BadInput for a config that peers would train differently, and for a folder that is not a checkout."""
    for key, value in ALIKE.items():
        if (given := getattr(config, key)) != value:
            raise BadInput(f"{key}={given}: not every peer supports it; expected --{key}={value}")
    if nanogpt:
        require_checkout(nanogpt)


def require_checkout(nanogpt):
    """Raises BadInput unless a folder is a checkout of nanoGPT."""
    if not Path(nanogpt, "train.py").is_file():
        raise BadInput(f"--nanogpt={nanogpt}: no train.py there; expected a checkout of karpathy/nanoGPT")


def measure(config, peer="ours", best=False, steps=4, nanogpt=None):
    """The figures of the peer in the file of that name.

    best: its own best settings, instead of its defaults. steps: the least number to time. nanogpt: path of a checkout.
    """
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # a Trainer takes all that there are
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        task = Task(config, steps, best, folder, nanogpt)
        setting = importlib.import_module(f"lab.measure.peers.{peer}").train(task)
    return task.clock.figures() | {"tokens": config.batch_size * config.context_length, "setting": setting}


class Clock:
    """Times the steps of a loop that reports the end of each, from the end of step WARMUP on; the first one compiles.

    It times at least `steps` steps and WINDOW seconds, and waits for the device only at both ends.
    """

    def __init__(self, device, steps):
        self.device, self.last = device, WARMUP + steps
        self.losses = []  # of every step: numbers, or tensors on the device

    def start(self):
        """Starts the clock. Call it after all imports and before anything is built."""
        self.resident_before = resident_before()
        self.begin = synchronized_time(self.device)

    def step(self, loss):
        """Counts a step that has ended, and its loss. Returns True if it was the last one."""
        self.losses.append(loss)
        done = len(self.losses)
        if done == 1:
            self.first = synchronized_time(self.device) - self.begin
            machine.reset_peak_memory(self.device)  # it may be the compiler's
        if done == WARMUP:
            self.begin = synchronized_time(self.device)
        if done < self.last or perf_counter() - self.begin < WINDOW:
            return False
        self.seconds = (synchronized_time(self.device) - self.begin) / (done - WARMUP)
        return True

    def figures(self):
        """Seconds of a step and of the first one, losses, and peak bytes since: of tensors on a GPU, else resident."""
        on_gpu, resident = self.device.type == "cuda", resident_bytes("VmHWM")
        return {
            "seconds": self.seconds,
            "first_step_seconds": self.first,
            "peak": torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
            "resident_bytes": None if on_gpu else resident and resident - self.resident_before,
            "losses": [float(loss) for loss in self.losses[: self.last]],
        }


class Task:
    """A training task for a peer.

    config: as configured, at a constant learning rate; it says the dtype and the workers of a loop at its best. naive:
    the same without any optimization; the initial weights are drawn with it. best: whether the peer is to use its own
    best settings. folder: for files that it must write. checkout: of the peer's code, if it needs one.
    """

    def __init__(self, config, steps, best, folder, checkout=None):
        dataset = data.open_dataset(config)
        constant = {"min_lr": config.learning_rate, "warmup_steps": 0, "lr_decay_steps": 0, "max_steps": 1_000_000}
        self.config = dataclasses.replace(config, vocab_size=dataset.vocab_size, **constant)
        self.naive = dataclasses.replace(self.config, **apply([files()["naive"]], {}, vars(self.config)))
        self.split, self.best, self.folder, self.checkout = dataset.train, best, Path(folder), checkout
        self.device = machine.choose_device(config.device)
        self.clock = Clock(self.device, steps)
        self.batches = data.TrainingBatches(self.split, self.naive)  # [step], counted from 1
        # Name of the dtype of matrix products at the peer's best: float32, bfloat16 or float16
        self.dtype = str(machine.choose_dtype(config.dtype, self.device)).removeprefix("torch.")

    def model(self, **fields):
        """The initial model on the CPU, plain but for these fields of its config."""
        return GPT(dataclasses.replace(self.naive, **fields))

    def loader(self, **options):
        """The batches of all steps in order, read as the options of a DataLoader say."""
        return DataLoader(self.batches, None, sampler=range(1, 1 + self.naive.max_steps), **options)
