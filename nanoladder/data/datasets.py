"""Prepared folders, opened and checked.

A folder holds train.bin and val.bin, headerless uint16 or uint32 token ids, and meta.json, as data/writer.py says.
It may come from anywhere: all of it is checked when it is opened. A folder made by nanoGPT, without meta.json, is
read too.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model import IGNORE
from nanoladder import files
from nanoladder.data.meta import SPLITS, read_meta
from nanoladder.errors import BadInput

DATA_DIR = Path(__file__).parents[2] / "data"
TOKENIZER = ("tokenizer.json", "tokenizer.tiktoken")


class Split:
    """One split of a prepared folder: the token ids, and where its windows of at most T + 1 tokens lie.

    A dense split is cut every T tokens, from a phase that the caller gives. In a split of documents no window
    crosses from one document into the next, and a short one is padded.
    """

    def __init__(self, folder, name, meta, context_length):
        self.arguments = folder, name, meta, context_length
        self.path = folder / f"{name}.bin"
        self.tokens = np.asarray(np.memmap(self.path, dtype=meta["dtype"], mode="r"))  # still the mapped file
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
        """The size and a digest of the beginning of the file."""
        beginning = hashlib.sha256(self.tokens[: 1 << 20].tobytes()).hexdigest()[:8]
        return f"{len(self.tokens)} tokens, digest {beginning}"

    def __reduce__(self):
        return Split, self.arguments  # a worker process maps the file again rather than receive its contents

    def read(self, windows, phases=0):
        """Inputs and targets, two int64 arrays (len(windows), T); padding is token 0 with target IGNORE.

        windows: (n,) numbers of windows. phases: the phase at which each is cut, or one for all.
        """
        T = self.context_length
        windows = np.asarray(windows, dtype=np.int64)
        starts = self.starts[windows] if self.documents else np.asarray(phases) + windows * T
        places = np.minimum(starts[:, None] + np.arange(T + 1), len(self.tokens) - 1)  # (n, T + 1)
        ids = self.tokens[places].astype(np.int64)
        inputs, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
        if self.documents:
            padding = np.arange(T) >= self.lengths[windows, None]
            inputs[padding], targets[padding] = 0, IGNORE
        return inputs, targets


@dataclass(frozen=True)
class Dataset:
    """A prepared folder that was checked and can serve.

    meta: what meta.json says, at least vocab_size, dtype and documents.
    """

    folder: Path
    meta: dict
    train: Split
    val: Split

    @property
    def vocab_size(self):
        """The model's vocabulary: the folder's own, or a larger one that the config asks for."""
        return self.meta["vocab_size"]

    def fingerprint(self):
        """{file name: its size and a digest} of both splits, to compare with another machine's."""
        return {split.path.name: split.fingerprint() for split in (self.train, self.val)}


def open_dataset(config):
    """Opens the prepared folder that config.dataset names, by its name in data/ or by its path.

    Raises BadInput if it is damaged, or does not fit vocab_size (0: the folder's own) or context_length.
    """
    folder = find_folder(config.dataset)
    meta = read_meta(folder, config.vocab_size)
    for name in SPLITS:
        check_split(folder, name, meta, config.context_length)
    for path in (folder / name for name in TOKENIZER):  # the run takes a copy of it
        if os.path.lexists(path) or path.name in meta.get("sha256", {}):
            check_digest(path, hashlib.sha256(contents(path)), meta)
    return Dataset(folder, meta, *(Split(folder, name, meta, config.context_length) for name in SPLITS))


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
