"""Batches of tokens: training batches are a pure function of (seed, step), validation batches are always the same."""

import atexit
import errno
import math
import multiprocessing
import re
import signal
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info

from model import IGNORE
from nanoladder.config import Config
from nanoladder.data.datasets import Split

SHUFFLED, ROUNDS = 2**14, 8  # windows shuffled at a time; rounds of their shuffle
WORKERS_OF_GPU = 2
GRACE = 600  # seconds, more than torchrun and SLURM usually leave between SIGTERM and SIGKILL


class Batch(NamedTuple):
    """Sequences of token ids and, at each position, the id that follows. A target of IGNORE is padding."""

    inputs: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64

    @property
    def n_tokens(self) -> torch.Tensor:
        """Number of valid targets: a tensor () on the batch's device, so that counting does not wait for the GPU."""
        return (self.targets != IGNORE).sum()

    def split(self, size: Any) -> list["Batch"]:
        """List of micro-batches of `size` sequences."""
        return [Batch(*parts) for parts in zip(self.inputs.split(size), self.targets.split(size), strict=True)]

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(*(tensor.to(device, non_blocking=non_blocking) for tensor in self))


@dataclass(frozen=True)
class Batches:
    """Batches of a split, or one process's share of each."""

    split: Split
    config: Config
    rank: int = 0
    world_size: int = 1
    positions: torch.Tensor | None = None  # (T,) positions to keep of each sequence; None: all
    at_once: int = 1  # micro-batches in a forward pass of an evaluation

    def share(self, rank, world_size, positions=None, at_once=1):
        """Returns the share of process `rank` of `world_size`, only at these positions of each sequence (None: all)."""
        return replace(self, rank=rank, world_size=world_size, positions=positions, at_once=at_once)

    def read(self, windows, phases, n_rows):
        """Returns the windows as a Batch of n_rows; rows beyond the windows are padding."""
        batch = Batch(*map(torch.from_numpy, self.split.read(windows, phases)))
        if self.positions is not None:
            batch = Batch(*(tensor[:, self.positions] for tensor in batch))
        if len(windows) == n_rows:
            return batch
        padding = (0, 0, 0, n_rows - len(windows))  # rows below
        pad = torch.nn.functional.pad
        return Batch(pad(batch.inputs, padding), pad(batch.targets, padding, value=IGNORE))


class TrainingBatches(Batches, torch.utils.data.Dataset):
    """batches[step] is the Batch of that step, counted from 1.

    Training reads an endless stream of sequences: each epoch visits every window once, in a new order and cut at a new
    phase. A batch is the next stretch of that stream, and the processes share it in order, so that neither their number
    nor the micro-batch size changes the data.
    """

    def __getitem__(self, step):
        return self.read(*self.cuts(step), len(self.sequences(step)))

    def windows(self, step: int) -> list[tuple[int, int]]:
        """List of (window, phase), one for each sequence of the step."""
        return list(zip(*(numbers.tolist() for numbers in self.cuts(step)), strict=True))

    def cuts(self, step):
        """Two int64 arrays (n,) for the step's n sequences: their windows, and the phase at which each is cut."""
        n = self.split.n_windows
        sequences = self.sequences(step)
        windows, phases = np.empty((2, len(sequences)), dtype=np.int64)
        done = 0
        while done < len(sequences):  # once, or more often if the batch straddles epochs or blocks
            epoch, place = divmod(sequences[done], n)
            block, first = divmod(place, SHUFFLED)
            order, phase = shuffle(self.config.seed, epoch, n, self.split.n_phases, block)
            part = order[first : first + len(sequences) - done]
            windows[done : done + len(part)], phases[done : done + len(part)] = part, phase
            done += len(part)
        return windows, phases

    def sequences(self, step):
        """The range of sequences that a step takes from the stream."""
        n_rows = self.config.batch_size // self.world_size
        first = (step - 1) * self.config.batch_size + self.rank * n_rows
        return range(first, first + n_rows)


class ValidationBatches(Batches):
    """Iterates over the validation windows: eval_windows of them (0: all), evenly spaced, the same each time.

    Every process gets the same number of batches of the same shape; the last rows may be padding.
    """

    @property
    def chosen(self) -> np.ndarray:
        """Numbers of the windows, in all processes together: (n,) int64."""
        n = min(self.config.eval_windows or self.split.n_windows, self.split.n_windows)
        return np.arange(n) * self.split.n_windows // n

    def __iter__(self):
        windows, n = self.chosen, len(self.chosen)
        share = self.config.batch_size // self.world_size
        # Rows in one forward pass of one process
        n_rows: int = min(self.config.micro_batch_size * self.at_once or share, share)  # pyright: ignore  auto is resolved
        for start in range(0, n, self.world_size * n_rows):
            first = start + self.rank * n_rows
            yield self.read(windows[first : first + n_rows], 0, n_rows)


@lru_cache(maxsize=2)  # a batch may straddle two blocks
def shuffle(seed: int, epoch: int, n_windows: int, n_phases: int, block: int) -> tuple[np.ndarray, int]:
    """Returns a block of an epoch's window order, at most (SHUFFLED,) int64, and the phase at which windows are cut.

    Memory and time do not depend on n_windows: see permuted().
    """
    rng = np.random.default_rng([seed, epoch])
    keys, phase = rng.integers(2**64, size=ROUNDS, dtype=np.uint64), int(rng.integers(n_phases))
    places = np.arange(block * SHUFFLED, min((block + 1) * SHUFFLED, n_windows), dtype=np.uint64)
    return permuted(places, n_windows, keys).astype(np.int64), phase


def permuted(places, n, keys):
    """Returns the elements at these places of a pseudo-random permutation of 0 … n - 1: (len(places),) uint64.

    A Feistel network with one key per round (Luby and Rackoff 1988). A number below a · b is a pair (left below a,
    right below b), and each round adds a hash of one half to the other, which is invertible. As a · b may exceed n by
    less than a, a few results are too large; they are permuted again until they fit (cycle walking; Black and Rogaway
    2002).
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    left, right = places // np.uint64(b), places % np.uint64(b)
    for key in keys.reshape(-1, 2):
        left = add(left, right, key[0], a)
        right = add(right, left, key[1], b)
    numbers = left * np.uint64(b) + right
    if len(large := np.flatnonzero(numbers >= n)):
        numbers[large] = permuted(numbers[large], n, keys)
    return numbers


def add(half, other, key, size):
    """Returns (half + hash(other, key)) modulo size. size: at most 2^32. The hash is the first part of splitmix64's."""
    hashed = (other + key) * np.uint64(0x9E3779B97F4A7C15)
    hashed = (hashed ^ hashed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    hashed = (hashed ^ hashed >> np.uint64(27)) >> np.uint64(32)
    total = half + (hashed * np.uint64(size) >> np.uint64(32))  # scales a number below 2^32 to one below size
    return np.where(total < size, total, total - np.uint64(size))


def prefetch(items: Iterable[Batch]) -> Iterator[Batch]:
    """Yields each item only after the next one is made, so that on a GPU the next batch is copied during a step."""
    items = iter(items)
    for item in items:
        for following in items:
            yield item
            item = following
        yield item


def count_workers(number: int | str, device: torch.device) -> int:
    """Returns the number of a loader's workers. auto: none on a CPU, whose cores train, and where nothing is copied."""
    if number == "auto":
        return WORKERS_OF_GPU if device.type == "cuda" else 0
    return int(number)


def share(batch):
    """Moves a worker's batch to shared memory, so that an error of a full /dev/shm ends the run.

    Otherwise a thread of the worker would do it later, print its error, and let the run wait for this batch for ever.
    """
    return Batch(*(tensor.share_memory_() for tensor in batch)) if get_worker_info() else batch


def full_shared_memory(error: BaseException) -> str | None:
    """Returns advice if a loader raised the exception because it found no space in shared memory, else None.

    The loader's queues have semaphores there.
    """
    semaphore = isinstance(error, OSError) and "synchronize.py" in traceback.format_tb(error.__traceback__)[-1]
    if re.search("shared memory.*No space left|Bus error", str(error)) or (semaphore and error.errno == errno.ENOSPC):
        what = "shared memory (/dev/shm) has no room for the batches of the loader's workers"
        return f"{what}; expected --num_workers=0, or more of it, such as by docker run --shm-size=1g"
    return None


def survive_signals(_worker):
    """Keeps a loader's worker process alive after a signal to its process group, until the run has saved."""
    signal.set_wakeup_fd(-1)  # the run's, which a fork inherits
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):  # Windows has neither this nor alarms, and its SIGTERM kills at once
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE))


@atexit.register
def end_workers() -> None:
    """Kills workers left behind by a failed run. Python would send them SIGTERM, which they survive, and wait."""
    if hasattr(signal, "SIGCHLD"):  # workers on Windows do not survive signals
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler raises an error for a worker that is killed
        for process in multiprocessing.active_children():
            if process.daemon:
                process.kill()


# Arguments of a DataLoader of TrainingBatches. A DataLoader without a generator of its own draws from the global one,
# and dropout would depend on num_workers.
WORKERS = {"generator": torch.Generator(), "collate_fn": share, "worker_init_fn": survive_signals}
