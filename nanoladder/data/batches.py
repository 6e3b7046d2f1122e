"""Batches of tokens from a prepared folder. A batch is a pure function of (seed, step).

A folder holds train.bin and val.bin, headerless uint16 or uint32 token ids, and meta.json, as data/writer.py says.
It may come from anywhere: all of it is checked when it is opened. A folder made by nanoGPT, without meta.json, is
read too.
"""

import hashlib
import json
import math
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from model import IGNORE
from nanoladder import files
from nanoladder.data import FORMAT_VERSION, checksum
from nanoladder.errors import BadInput

DATA_DIR = Path(__file__).parents[2] / "data"
SPLITS = ("train", "val")
TOKENIZER = ("tokenizer.json", "tokenizer.tiktoken")
LARGEST_VOCABULARY = {"uint16": 2**16, "uint32": 2**32}  # by dtype


class Split:
    """One split of a prepared folder: the token ids, and where its windows of at most T + 1 tokens lie.

    A dense split is cut every T tokens, from a phase that the caller gives. In a split of documents no window
    crosses from one document into the next, and a short one is padded.
    """

    def __init__(self, folder, name, meta, context_length):
        self.arguments = folder, name, meta, context_length
        self.path = folder / f"{name}.bin"
        self.tokens = np.memmap(self.path, dtype=meta["dtype"], mode="r")
        self.context_length = T = context_length
        self.documents = meta["documents"]
        if self.documents:
            offsets = np.fromfile(folder / f"{name}.idx", dtype=np.uint64).astype(np.int64)
            targets = np.diff(offsets) - 1  # the first token of a document is given, not predicted
            pieces = np.maximum(-(-targets // T), 0)  # windows a document
            first = np.cumsum(pieces) - pieces
            index = np.arange(pieces.sum()) - np.repeat(first, pieces)  # window within its document
            self.starts = np.repeat(offsets[:-1], pieces) + index * T
            self.lengths = np.minimum(np.repeat(targets, pieces) - index * T, T)
            self.n_windows, self.n_phases = len(self.starts), 1
        else:
            # The same number of windows at every phase, so that an epoch has a fixed length.
            self.n_windows = max(1, (len(self.tokens) - T) // T)
            self.n_phases = min(T, len(self.tokens) - self.n_windows * T)

    def fingerprint(self):
        """{name: size and digest of its beginning} of the file, to compare it with another machine's."""
        beginning = hashlib.sha256(self.tokens[: 1 << 20].tobytes()).hexdigest()[:8]
        return {self.path.name: f"{len(self.tokens)} tokens, digest {beginning}"}

    def __reduce__(self):
        return Split, self.arguments  # a worker process maps the file again rather than receive its contents

    def read(self, windows, phase=0):
        """Inputs and targets, two int64 arrays (len(windows), T); padding is token 0 with target IGNORE."""
        T = self.context_length
        inputs = np.zeros((len(windows), T), dtype=np.int64)
        targets = np.full((len(windows), T), IGNORE, dtype=np.int64)
        for row, window in enumerate(windows):
            start, length = (self.starts[window], self.lengths[window]) if self.documents else (phase + window * T, T)
            ids = self.tokens[start : start + length + 1]
            inputs[row, :length] = ids[:-1]
            targets[row, :length] = ids[1:]
        return inputs, targets


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


def open_dataset(dataset, vocab_size, context_length):
    """Name or path of a prepared folder -> (meta, training split, validation split); BadInput if it cannot serve.

    vocab_size 0 takes the folder's own. meta holds at least vocab_size, dtype and documents.
    """
    folder = find_folder(dataset)
    meta = read_meta(folder, vocab_size)
    for name in SPLITS:
        check_split(folder, name, meta, context_length)
    for path in (folder / name for name in TOKENIZER):  # the run takes a copy of it
        if os.path.lexists(path) or path.name in meta.get("sha256", {}):
            check_digest(path, hashlib.sha256(contents(path)), meta)
    return meta, *(Split(folder, name, meta, context_length) for name in SPLITS)


def find_folder(dataset):
    for folder in (DATA_DIR / dataset, Path(dataset)):
        if os.path.lexists(folder / "train.bin"):
            return folder
    how = "python data/text/prepare.py --input FILES"
    for script in sorted(DATA_DIR.glob("*/prepare.py")):
        name = script.parent.name
        if dataset == name:
            how = f"python data/{name}/prepare.py"
        elif dataset.startswith(name + "_"):
            how = f"python data/{name}/prepare.py --tokenizer={dataset.removeprefix(name + '_')}"
            how = how.replace("=bpe", "=bpe:")
    raise BadInput(f"dataset={dataset}: no train.bin in data/{dataset} or in {dataset}; prepare it with `{how}`")


def read_meta(folder, vocab_size):
    path = folder / "meta.json"
    if not os.path.lexists(path):
        if not vocab_size:
            raise BadInput(
                f"{folder} has no meta.json; prepare it again, or, for headerless uint16 files as nanoGPT "
                "writes them, say what they hold with --vocab_size=N (50257 for GPT-2's tokenizer)"
            )
        return {"vocab_size": vocab_size, "dtype": "uint16", "documents": False}
    try:
        meta = checked(json.loads(files.read(path)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(f"{path} is not the meta.json of a prepared dataset ({reason}); prepare it again") from None
    own = meta["vocab_size"]
    if vocab_size and vocab_size < own:
        raise BadInput(f"vocab_size={vocab_size} is below the {own} token ids of {folder}; expected {own} or 0 for it")
    return {**meta, "vocab_size": vocab_size or own}


def checked(meta):
    """The entries of a meta.json that are used. Raises ValueError, KeyError or TypeError: not as writer.py writes."""

    def require(condition, what):
        if not condition:
            raise ValueError(what)

    version, dtype = meta["format_version"], meta["dtype"]
    require(
        (version, dtype) in [(FORMAT_VERSION, name) for name in LARGEST_VOCABULARY],
        f"format {version!r:.40} with {dtype!r:.40}; expected format {FORMAT_VERSION} with uint16 or uint32",
    )
    keys = ("vocab_size", "dtype", "documents", "tokenizer", "tokens", "bytes", "sha256")
    used = {key: meta[key] for key in keys}
    counts = {key: [used[key][name] for name in SPLITS] for key in ("tokens", "bytes")}
    counts["vocab_size"] = [used["vocab_size"]]
    for key, values in counts.items():
        most = LARGEST_VOCABULARY[dtype] if key == "vocab_size" else 2**63 - 1
        whole = all(type(value) is int and 1 <= value <= most for value in values)
        require(whole, f"{key}: expected whole numbers from 1 to {most}")
    require(type(used["documents"]) is bool, "documents: expected true or false")
    name = used["tokenizer"]
    require(isinstance(name, str) and name.isprintable() and len(name) < 100, "tokenizer: expected its name")
    require(isinstance(used["sha256"], dict), "sha256: expected the digest of each file")
    require(meta["checksum"] == checksum(meta), "its checksum is not that of its contents")
    return used


def check_split(folder, name, meta, context_length):
    path = folder / f"{name}.bin"
    if not path.is_file():
        raise BadInput(f"{path} is missing or no ordinary file; prepare the dataset again")
    n_tokens, left_over = divmod(path.stat().st_size, np.dtype(meta["dtype"]).itemsize)
    promised = meta["tokens"][name] if "tokens" in meta else n_tokens
    if left_over or n_tokens != promised:
        raise BadInput(
            f"{path} is truncated or foreign: {path.stat().st_size} bytes; expected {promised} tokens of "
            f"{meta['dtype']}; prepare the dataset again"
        )
    if meta["documents"]:
        check_index(folder / f"{name}.idx", n_tokens, meta)
    elif n_tokens < context_length + 1:
        raise BadInput(
            f"{path} holds {n_tokens} tokens, less than one window of context_length={context_length} and its "
            f"last target; expected at least {context_length + 1}: use more text or a shorter context"
        )
    try:
        largest, digest = scan(path, meta["dtype"])
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read ({error}); prepare the dataset again") from None
    check_digest(path, digest, meta)
    if largest >= meta["vocab_size"]:
        raise BadInput(
            f"{path} holds token id {largest}, beyond vocab_size={meta['vocab_size']}; "
            f"expected ids below it: set --vocab_size={largest + 1} or more, or prepare the dataset again"
        )


def check_index(path, n_tokens, meta):
    content = contents(path, limit=8 * (n_tokens // 2 + 1))  # a document is two tokens or more
    check_digest(path, hashlib.sha256(content), meta)
    offsets = np.frombuffer(content[: len(content) // 8 * 8], dtype="<u8")
    within = len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == offsets.max() == n_tokens
    if len(content) % 8 or not within or np.diff(offsets.astype(np.int64)).min() < 2:
        raise BadInput(f"{path} does not fit its .bin file; prepare the dataset again")


def check_digest(path, digest, meta):
    """Compares a file's SHA-256 with meta.json's, which a folder made by nanoGPT does not have."""
    if "sha256" in meta and digest.hexdigest() != meta["sha256"].get(path.name):
        raise BadInput(f"{path} is not the file that meta.json describes: another SHA-256; prepare the dataset again")


def contents(path, limit=2**26):
    """The bytes of a small file of the dataset."""
    try:
        return files.read(path, limit)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is missing or cannot be read ({error}); prepare the dataset again") from None


def scan(path, dtype, chunk=2**22):
    """A token file's largest id and its SHA-256, in one pass, chunk bytes at a time.

    Every process does it when it starts: 1 GB/s on a core with SHA instructions, 0.35 without, from the page cache.
    """
    largest, digest = 0, hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(chunk):
            largest = max(largest, int(np.frombuffer(part, dtype).max()))
            digest.update(part)
    return largest, digest
