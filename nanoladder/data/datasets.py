"""Prepared folders: finding one, opening it, and reading windows of its tokens.

A folder holds train.bin and val.bin, headerless uint16 or uint32 token ids, and meta.json, as writer.py describes. A
folder made by nanoGPT, without meta.json and perhaps with a meta.pkl, is read too.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from model import IGNORE
from nanoladder.data import checks, nanogpt
from nanoladder.data.meta import SPLITS, read_meta
from nanoladder.data.tokenizer import save_tokenizer
from nanoladder.errors import BadInput

DATA_DIR = Path(__file__).parents[2] / "data"


class Split:
    """One split of a prepared folder: its token ids, and the windows of at most T + 1 tokens that it is cut into.

    A dense split is one stream, cut every T tokens from a phase (an offset below T) that the caller chooses. In a split
    of separate documents no window crosses from one document into the next, and short windows are padded.
    """

    def __init__(self, folder, name, meta, context_length):
        self.arguments = folder, name, meta, context_length
        self.path = folder / f"{name}.bin"
        self.tokens = np.asarray(np.memmap(self.path, dtype=meta["dtype"], mode="r"))  # still mapped, not read
        self.context_length = T = context_length
        self.documents = meta["documents"]
        if self.documents:
            offsets = np.fromfile(folder / f"{name}.idx", dtype=np.uint64).astype(np.int64)
            targets = np.diff(offsets) - 1  # a document's first token is never predicted
            pieces = np.maximum(-(-targets // T), 0)  # windows per document
            first = np.cumsum(pieces) - pieces
            index = np.arange(pieces.sum()) - np.repeat(first, pieces)  # window within its document
            self.starts = np.repeat(offsets[:-1], pieces) + index * T
            self.lengths = np.minimum(np.repeat(targets, pieces) - index * T, T)
            self.n_windows, self.n_phases = len(self.starts), 1
        else:
            # The same number of windows at every phase, so that all epochs are equally long.
            self.n_windows = max(1, (len(self.tokens) - T) // T)
            self.n_phases = min(T, len(self.tokens) - self.n_windows * T)
            self.sequences = sliding_window_view(self.tokens, T + 1)  # that start at every place, as a view of the file

    def fingerprint(self):
        """The size of the file and a digest of a sample of it."""
        return f"{len(self.tokens)} tokens, digest {checks.sample(self.path)[:8]}"

    def __reduce__(self):
        return Split, self.arguments  # a worker process maps the file itself

    def read(self, windows, phases=0):
        """Inputs and targets, two int64 arrays (len(windows), T); padding is token 0 with target IGNORE.

        windows: (n,) numbers of windows. phases: the phase at which each is cut, or one for all.
        """
        T = self.context_length
        windows = np.asarray(windows, dtype=np.int64)
        if self.documents:
            places = self.starts[windows, None] + np.arange(T + 1)
            ids = np.take(self.tokens, places, mode="clip")  # (n, T + 1); beyond the file's end there is padding
        else:
            ids = self.sequences[phases + windows * T]  # (n, T + 1)
        inputs, targets = ids[:, :-1].astype(np.int64), ids[:, 1:].astype(np.int64)
        if self.documents:
            padding = np.arange(T) >= self.lengths[windows, None]
            inputs[padding], targets[padding] = 0, IGNORE
        return inputs, targets


@dataclass(frozen=True)
class Dataset:
    """A prepared folder, checked and open.

    meta: the entries of meta.json, at least vocab_size, dtype and documents.
    """

    folder: Path
    meta: dict
    train: Split
    val: Split

    @property
    def vocab_size(self):
        """Number of token ids: the folder's own, or a larger number that the config asks for."""
        return self.meta["vocab_size"]

    def save_tokenizer(self, out_dir):
        """Copies the tokenizer's files to a run's folder, for sample.py; writes them if it is that of a meta.pkl."""
        for file in self.folder.glob("tokenizer.*"):
            shutil.copyfile(file, out_dir / file.name)
        if nanogpt.has_vocabulary(self.folder):
            save_tokenizer(nanogpt.read_tokenizer(self.folder), out_dir)

    def fingerprint(self):
        """{file name: size and digest} of both splits, to compare with the data of another machine."""
        return {split.path.name: split.fingerprint() for split in (self.train, self.val)}


def open_dataset(config):
    """Opens the prepared folder that config.dataset names, by its name in data/ or by its path.

    Raises BadInput if there is no such folder, if it is damaged, or if it does not fit vocab_size (0: the folder's own)
    or context_length.
    """
    folder = find_folder(config.dataset)
    meta = read_meta(folder, config.vocab_size)
    checks.check(folder, meta, config.context_length, config.verify_data)
    return Dataset(folder, meta, *(Split(folder, name, meta, config.context_length) for name in SPLITS))


def find_folder(dataset):
    """The folder of a dataset, given by its name in data/ or by its path. Raises BadInput: says how to prepare it."""
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
