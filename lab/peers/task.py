"""The task that every peer gets: the same weights, batches and hyperparameters, and one clock."""

import contextlib
import dataclasses
import math
from functools import cached_property
from pathlib import Path

import torch
from torch.utils.data import Dataset

from lab.measure import resident_before, resident_bytes
from model import GPT
from nanoladder import data, machine
from nanoladder.run.clock import synchronized_time


class Clock:
    """Times the steps of a loop that reports the end of each. Reads the time only at both ends of the timed steps.

    warmup: steps before those; the first one compiles. steps: least number that are timed, and window, their least
    seconds: if they take less, more steps are timed in their place.
    """

    def __init__(self, device, warmup, steps, window):
        self.device, self.warmup, self.steps, self.window = device, warmup, steps, window
        self.losses = []  # of every step: numbers, or tensors on the device
        self.first = self.seconds = None  # from start() to the end of the first step; of a timed step
        self.resident_before = self.started = self.begin = self.end = None

    def start(self):
        """Starts the clock; to be called when everything is imported and nothing is built."""
        self.resident_before = resident_before()
        self.started = synchronized_time(self.device)

    def step(self, loss):
        """Counts a step that has ended, and its loss. Returns True if it was the last one."""
        self.losses.append(loss)
        done = len(self.losses)
        if done == 1:
            self.first = synchronized_time(self.device) - self.started
            self.forget_peaks()
        if done == self.warmup:
            self.begin, self.end = (done, synchronized_time(self.device)), done + self.steps
        elif done == self.end:
            (begin, time), now = self.begin, synchronized_time(self.device)
            if now - time >= self.window:
                self.seconds = (now - time) / (done - begin)
                return True
            n = done - begin
            more = min(4 * n, math.ceil(1.2 * n * self.window / (now - time)))  # so few may have been lucky
            self.begin, self.end = (done, now), done + more
        return False

    def forget_peaks(self):
        """Resets the peaks of memory, which may be the compiler's."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def resident(self):
        """Peak resident bytes since the first step, above those at the start; None if not known."""
        peak = resident_bytes("VmHWM")
        return peak and peak - self.resident_before


class Task:
    """A training task for a peer.

    config: as configured; it says the dtype and the workers of a loop at its best. naive: the same config without any
    optimization, as which the initial weights are drawn. best: if the peer is to use its own best settings. folder:
    for files that it must write.
    """

    def __init__(self, config, naive, clock, best, folder):
        dataset = data.open_dataset(naive)
        self.split, self.naive = dataset.train, dataclasses.replace(naive, vocab_size=dataset.vocab_size)
        self.config, self.clock, self.best, self.folder = config, clock, best, Path(folder)
        self.device = clock.device

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
