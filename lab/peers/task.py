"""The task that every peer gets: the same weights, batches and hyperparameters, and one clock.

python -m lab.peers.task time --peer=NAME config/x.py [--best] [--steps=4] measures the peer in the file of that name,
and prints its figures as one line of JSON.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import tempfile
import warnings
from functools import cached_property
from pathlib import Path
from nanoladder.entry import Parser, run_script

import torch
from torch.utils.data import Dataset

from lab.measure import WARMUP, WINDOW, end_if_out_of_memory, resident_before, resident_bytes
from model import GPT
from nanoladder import data, machine
from nanoladder.run import load_config
from nanoladder.run.clock import synchronized_time


def main(argv):
    parser = Parser(prog="lab.peers.task", allow_abbrev=False)
    parser.add_argument("measurement", choices=["time"])
    parser.add_argument("--peer", required=True, help="name of its file")
    parser.add_argument("--best", action="store_true", help="its own best settings, instead of its defaults")
    parser.add_argument("--steps", type=int, default=4, help="least number of steps to time")
    parser.add_argument("--nanogpt", help="checkout of nanoGPT")
    options, words = parser.parse_known_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # a Trainer takes all that there are
    warnings.filterwarnings("ignore")
    try:
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            print(json.dumps(measure(options, words, folder)))
    except Exception as error:
        end_if_out_of_memory(error)
        raise


def measure(options, words, folder):
    """Lets a peer train at a constant learning rate until the clock ends it. Returns the figures."""
    train = importlib.import_module(f"lab.peers.{options.peer}").train
    rate = load_config(words).learning_rate
    constant = [f"--min_lr={rate}", "--warmup_steps=0", "--lr_decay_steps=0", "--max_steps=1000000"]
    config, naive = (load_config([*words, *constant, *stage]) for stage in ([], ["--stage=naive"]))
    clock = Clock(machine.choose_device(config.device), WARMUP, options.steps, WINDOW)
    setting, dtype = train(Task(config, naive, clock, options.best, folder, options.nanogpt))
    tokens = config.batch_size * config.context_length
    return clock.figures(WARMUP + options.steps) | {"tokens": tokens, "setting": setting, "dtype": dtype}


class Clock:
    """Times the steps of a loop that reports the end of each. Reads the time only at both ends of the timed steps.

    warmup: steps before those; the first one compiles. steps: number that is timed; if they take less than the window,
    in seconds, twice as many are timed in their place, and so on.
    """

    def __init__(self, device, warmup, steps, window):
        self.device, self.warmup, self.steps, self.window = device, warmup, steps, window
        self.losses = []  # of every step: numbers, or tensors on the device

    def start(self):
        """Starts the clock; to be called when everything is imported and nothing is built."""
        self.resident_before = resident_before()
        self.begin, self.end = synchronized_time(self.device), None

    def step(self, loss):
        """Counts a step that has ended, and its loss. Returns True if it was the last one."""
        self.losses.append(loss)
        done = len(self.losses)
        if done == 1:
            self.first = synchronized_time(self.device) - self.begin
            self.forget_peaks()  # they may be the compiler's
        if done == self.warmup:
            self.begin, self.end = synchronized_time(self.device), done + self.steps
        elif done == self.end:
            elapsed = synchronized_time(self.device) - self.begin
            if elapsed >= self.window:
                self.seconds = elapsed / self.steps
                return True
            self.steps *= 2
            self.begin, self.end = self.begin + elapsed, done + self.steps
        return False

    def forget_peaks(self):
        """Resets the peaks of memory."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def figures(self, n_losses):
        """Seconds of a step and of the first one, losses, and peak bytes since: of tensors on a GPU, else resident."""
        resident, on_gpu = resident_bytes("VmHWM"), self.device.type == "cuda"
        return {
            "seconds": self.seconds,
            "first_step_seconds": self.first,
            "peak": torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
            "resident_bytes": None if on_gpu else resident and resident - self.resident_before,
            "losses": [float(loss) for loss in self.losses[:n_losses]],
        }


class Task:
    """A training task for a peer.

    config: as configured; it says the dtype and the workers of a loop at its best. naive: the same config without any
    optimization, as which the initial weights are drawn. best: if the peer is to use its own best settings. folder:
    for files that it must write. checkout: of the peer's code, if it needs one.
    """

    def __init__(self, config, naive, clock, best, folder, checkout=None):
        dataset = data.open_dataset(naive)
        self.split, self.naive = dataset.train, dataclasses.replace(naive, vocab_size=dataset.vocab_size)
        self.config, self.clock, self.best = config, clock, best
        self.folder, self.checkout, self.device = Path(folder), checkout, clock.device

    @property
    def dtype(self):
        """Name of the dtype of matrix products at the peer's best: float32, bfloat16 or float16."""
        return str(machine.choose_dtype(self.config.dtype, self.device)).removeprefix("torch.")

    @cached_property
    def batches(self):
        """batches[step] is the data.Batch of a step, counted from 1."""
        return data.TrainingBatches(self.split, self.naive)

    def model(self, **fields):
        """The initial model on the CPU, plain but for these fields of its config."""
        return GPT(dataclasses.replace(self.naive, **fields))

    def sequences(self):
        """A map-style dataset of the sequences of all batches in order."""
        return Sequences(self.batches, self.naive.max_steps)


class Sequences(Dataset):
    """The sequences of the first n_steps batches, one by one: pairs of inputs and targets, each (T,) int64."""

    def __init__(self, batches, n_steps):
        self.batches, self.n_steps = batches, n_steps
        self.number, self.batch = 0, None  # the batch that was read last

    def __len__(self):
        return self.n_steps * self.batches.config.batch_size

    def __getitem__(self, index):
        step, row = divmod(index, self.batches.config.batch_size)
        if step + 1 != self.number:
            self.number, self.batch = step + 1, self.batches[step + 1]
        return self.batch.inputs[row], self.batch.targets[row]


if __name__ == "__main__":
    run_script(main)
