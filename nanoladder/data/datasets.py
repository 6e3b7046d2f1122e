"""Prepared folders: finding one, opening it, and reading windows of its tokens.

A folder holds train.bin and val.bin, headerless uint16 or uint32 token ids, and meta.json, as prepare/writer.py
describes. A folder made by nanoGPT, without meta.json and perhaps with a meta.pkl, is read too.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from tiktoken import Encoding

from model import IGNORE
from nanoladder import files
from nanoladder.config import Config
from nanoladder.errors import BadInput, nearest, reading
from nanoladder.prepare.meta import DATA_DIR, SPLITS, check, read_meta, sample_digest
from nanoladder.tokenizer import meta_pkl
from nanoladder.tokenizer.encoding import DESCRIPTION, is_name, load_tokenizer, save_tokenizer


class Split:
    """One split of a prepared folder: its token ids, and the windows of at most T + 1 tokens into which it is cut.

    A dense split is one stream, cut every T tokens from a phase (an offset below T) that the caller chooses. In a split
    of separate documents no window crosses from one document into the next, and short windows are padded.
    """

    def __init__(self, folder: Path, name: str, meta: dict, context_length: int) -> None:
        self.arguments = folder, name, meta, context_length
        self.path = folder / f"{name}.bin"
        self.context_length = T = context_length
        self.tokens = np.asarray(np.memmap(self.path, meta["dtype"], mode="r"))  # read only when used
        # The T + 1 tokens starting at each place, without a copy.
        self.sequences = sliding_window_view(self.tokens, T + 1) if len(self.tokens) > T else np.empty((0, T + 1))
        self.documents = meta["documents"]
        if self.documents:
            self.offsets = map_index(folder / f"{name}.idx", len(self.tokens))
            self.first = first_windows(self.offsets, T)
            self.n_windows, self.n_phases = int(self.first[-1]), 1
        else:
            # The same number of windows at every phase, so that all epochs are equally long.
            self.n_windows = max(1, (len(self.tokens) - T) // T)
            self.n_phases = min(T, len(self.tokens) - self.n_windows * T)

    @property
    def n_targets(self) -> int:
        """Number of tokens that can be predicted: all but the first of the stream, or of each document."""
        return len(self.tokens) - (len(self.offsets) - 1 if self.documents else 1)

    def __reduce__(self):
        return Split, self.arguments  # a worker process maps the file itself

    def cut(self, windows: Any, phases: Any = 0) -> tuple[np.ndarray, np.ndarray]:
        """Places in the stream at which windows begin, and the number of targets from there to the end of the document
        or stream: two int64 arrays (n,).

        windows: (n,) numbers of windows. phases: the phase at which each is cut, or one for all.
        """
        windows = np.asarray(windows, dtype=np.int64)
        if not self.documents:
            starts = phases + windows * self.context_length
            return starts, len(self.tokens) - 1 - starts
        document = np.searchsorted(self.first, windows, side="right") - 1
        starts = self.offsets[document].astype(np.int64) + (windows - self.first[document]) * self.context_length
        return starts, self.offsets[document + 1].astype(np.int64) - 1 - starts

    def read(self, windows: Any, phases: Any = 0) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, two int64 arrays (n, T), of the windows that cut() finds; padding is token 0 with target
        IGNORE.
        """
        starts, n_targets = self.cut(windows, phases)
        ids = np.zeros((len(starts), self.context_length + 1), self.tokens.dtype)  # (n, T + 1)
        whole = starts < len(self.sequences)
        ids[whole] = self.sequences[starts[whole]]
        for row in np.flatnonzero(~whole):  # windows of the last documents
            rest = self.tokens[starts[row] :]
            ids[row, : len(rest)] = rest
        inputs, targets = ids[:, :-1].astype(np.int64), ids[:, 1:].astype(np.int64)
        if self.documents:
            padding = np.arange(self.context_length) >= n_targets[:, None]
            inputs[padding], targets[padding] = 0, IGNORE
        return inputs, targets


def map_index(path, n_tokens):
    """Maps an index, (documents + 1,) uint64. Raises ValueError unless it rises from 0 to n_tokens."""
    files.size(path)  # a pipe would block
    offsets = np.memmap(path, dtype="<u8", mode="r")
    if offsets[0] != 0 or offsets[-1] != n_tokens or (offsets[1:] <= offsets[:-1]).any():
        raise ValueError(f"{path.name} does not rise from 0 to {n_tokens} tokens")
    return offsets


def first_windows(offsets, context_length):
    """Returns the number of windows before each document and, last, in total: (documents + 1,) int64."""
    targets = np.diff(offsets.astype(np.int64)) - 1  # the first token is never predicted
    return np.concatenate([[0], np.cumsum(-(-targets // context_length))])


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
    def vocab_size(self) -> int:
        """Number of token ids: the folder's own, or a larger number that the config asks for."""
        return self.meta["vocab_size"]

    @property
    def bits_per_nat(self) -> float | None:
        """Bits per byte of val's text at a loss of one nat per token; None if the number of bytes is not known."""
        n_bytes = self.meta.get("bytes")
        return self.val.n_targets / n_bytes["val"] / math.log(2) if n_bytes else None

    @property
    def unit(self) -> tuple[float, str]:
        """What makes nats per token the unit in which losses are reported, and that unit's name."""
        return (self.bits_per_nat, "bits per byte") if self.bits_per_nat else (1.0, "nats per token")

    def find_tokenizer(self) -> Encoding | None:
        """Returns the tokenizer, a tiktoken.Encoding, or None if there is none. Raises BadInput for a damaged one."""
        if meta_pkl.exists(self.folder):
            return meta_pkl.read_tokenizer(self.folder)
        return load_tokenizer(self.folder) if os.path.lexists(self.folder / DESCRIPTION) else None

    def save_tokenizer(self, out_dir: Path | str) -> None:
        """Writes the tokenizer, if there is one, to a run's folder, for sample.py."""
        if encoding := self.find_tokenizer():
            save_tokenizer(encoding, out_dir)

    def fingerprint(self) -> dict:
        """{name of its file: size and digest} of both splits, to compare with the data of another machine."""
        return {
            split.path.name: f"{len(split.tokens)} tokens, digest {sample_digest(split.path)[:8]}"
            for split in (self.train, self.val)
        }


def open_dataset(config: Config) -> Dataset:
    """Opens the prepared folder that config.dataset names, by its name in data/ or by its path.

    Raises BadInput if there is no such folder, if it is damaged, or if it does not fit vocab_size (0: the folder's own)
    or context_length.
    """
    folder = find_folder(config.dataset)
    meta = read_meta(folder, config.vocab_size)
    check(folder, meta, config.context_length)
    with reading(f"{folder} cannot be read", "prepare the dataset again"):
        return Dataset(folder, meta, *(Split(folder, name, meta, config.context_length) for name in SPLITS))


def find_folder(dataset):
    """The folder of a dataset, given by its name in data/ or by its path. Raises BadInput: says how to prepare it."""
    for folder in (DATA_DIR / dataset, Path(dataset)):
        if os.path.lexists(folder / "train.bin"):
            return folder
    names = {path.parent.name for path in DATA_DIR.glob("*/*") if path.name in ("prepare.py", "meta.json")}
    how = prepare_command(dataset) or nearest(dataset, sorted(names))
    how = how or (
        "; for your own text, `python data/text/prepare.py --input FILES --out_dir=FOLDER`, and to train a model "
        "further on it, --tokenizer=MODEL too, with the model's folder"
    )
    raise BadInput(f"dataset={dataset}: no train.bin in data/{dataset} or in {dataset}{how}")


def prepare_command(dataset):
    """Returns the command whose default folder is data/<dataset>, as a text to append; "" if there is none."""
    for script in sorted((path.parent.name for path in DATA_DIR.glob("*/prepare.py")), reverse=True):
        tokenizer = dataset.removeprefix(script).removeprefix("_").replace("bpe", "bpe:")
        if dataset == script or (dataset.startswith(f"{script}_") and is_name(tokenizer)):
            words = " --input FILES" * (script == "text") + f" --tokenizer={tokenizer}" * (dataset != script)
            return f"; prepare it with `python data/{script}/prepare.py{words}`"
    return ""
