"""Batches of tokens. A batch is a pure function of (seed, step)."""

import math
from functools import lru_cache

import numpy as np
import torch
from torch.utils.data import Dataset

from model import IGNORE


@lru_cache(maxsize=2)  # a batch may straddle two epochs
def shuffle(seed, epoch, n_windows, n_phases):
    """The order of an epoch's windows (n_windows,), and the phase at which they are cut."""
    rng = np.random.default_rng([seed, epoch])
    return rng.permutation(n_windows), int(rng.integers(n_phases))


class TrainingBatches(Dataset):
    """batches[step] -> this process's share of the step's global batch: inputs, targets, each (B, T) int64.

    Each epoch visits every window once, in a new order and cut at a new phase. Row r of step s is sequence
    s · batch_size + r of that endless stream, so the number of processes changes nothing but who reads a row.
    """

    def __init__(self, split, batch_size, seed, rank=0, world_size=1):
        self.split, self.batch_size, self.seed = split, batch_size, seed
        self.rank, self.world_size = rank, world_size

    def sequences(self, step):
        """The places in the stream of this process's rows."""
        share = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * share
        return range(first, first + share)

    def windows(self, step):
        """The (window, phase) of each row of this process."""
        n = self.split.n_windows
        for sequence in self.sequences(step):
            order, phase = shuffle(self.seed, sequence // n, n, self.split.n_phases)
            yield int(order[sequence % n]), phase

    def __getitem__(self, step):
        rows = [self.split.read([]), *(self.split.read([window], phase) for window, phase in self.windows(step))]
        inputs, targets = (np.concatenate(arrays) for arrays in zip(*rows, strict=True))
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def growing(self, warmup_steps, micro_batch_size):
        """Batches of the same stream that grow to this size over the first warmup_steps; 0: these."""
        return GrowingBatches(self, warmup_steps, micro_batch_size) if warmup_steps else self


class GrowingBatches(TrainingBatches):
    """Batches whose size grows to batch_size over the first warmup_steps, as sequences_before says.

    A step continues the stream where the one before ended, in order, whatever the number of processes. So that shapes
    stay, every process has as many whole micro-batches as the others; the rows that this takes beyond do not count.
    """

    def __init__(self, whole, warmup_steps, micro_batch_size):
        super().__init__(whole.split, whole.batch_size, whole.seed, whole.rank, whole.world_size)
        self.warmup_steps = warmup_steps
        self.micro_batch_size = min(micro_batch_size, self.batch_size // self.world_size)

    def extent(self, step):
        """Where the whole batch begins and ends in the stream, and how many rows each process has."""
        first, end = (sequences_before(n, self.batch_size, self.warmup_steps) for n in (step, step + 1))
        micro_batches = math.ceil((end - first) / (self.world_size * self.micro_batch_size))
        return first, end, micro_batches * self.micro_batch_size

    def sequences(self, step):
        first, end, share = self.extent(step)
        return range(first + self.rank * share, min(first + (self.rank + 1) * share, end))

    def __getitem__(self, step):
        return padded(*super().__getitem__(step), self.extent(step)[2])


def sequences_before(step, batch_size, warmup_steps):
    """The number of sequences in the batches before `step` (from 0), which warm up to batch_size.

    They grow linearly, as in GPT-3 (Brown et al. 2020): row r is in every step from r · warmup_steps // batch_size on.
    """
    if not warmup_steps:
        return step * batch_size
    return sum(max(0, step - row * warmup_steps // batch_size) for row in range(batch_size))


def tokens_seen(step, config):
    """Training tokens in the batches of the first `step` steps."""
    return sequences_before(step, config.batch_size, config.batch_warmup_steps) * config.context_length


def padded(inputs, targets, n_rows):
    """Inputs and targets with rows of token 0 and target IGNORE below, (n_rows, T)."""
    below = (0, 0, 0, n_rows - len(inputs))
    return torch.nn.functional.pad(inputs, below), torch.nn.functional.pad(targets, below, value=IGNORE)


def validation_batches(split, n_windows, batch_size, rank=0, world_size=1):
    """The same validation windows each time, evenly spaced: yields inputs, targets, each (batch_size, T) int64.

    n_windows 0, or more than there are: all. Each process has its share of them, in the same number of batches;
    the last ones are filled up with rows that do not count.
    """
    n = min(n_windows or split.n_windows, split.n_windows)
    chosen = np.arange(n) * split.n_windows // n
    for start in range(rank * batch_size, n + rank * batch_size, world_size * batch_size):
        inputs, targets = map(torch.from_numpy, split.read(chosen[start : start + batch_size]))
        yield padded(inputs, targets, batch_size)
