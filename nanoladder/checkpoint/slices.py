"""Checkpoints of divided models: the tensors lie in files of slices, one of each process that saved some.

The checkpoint itself, such as last.safetensors, is their index. Besides the scalars and the metadata it has one more
entry, slices:

    folder      of the files, beside the checkpoint: step_00000250.slices; a file is named after its number: 00003
    sizes       stages × shards × parts of every matrix: a file for each of their combinations, in this order
    headers     SHA-256 of the header of every file, which has those of its slices; "" if there was nothing to save
    tensors     {name: [dtype, stage, *Division]}, from which follows which file has which slice

A slice is a tensor, named by what it is of the whole: head.weight[0:64,0:32].
"""

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from nanoladder import files
from nanoladder.checkpoint.format import (
    DTYPES,
    MAX_HEADER,
    dtype_name,
    read_flat,
    reading,
    sha256_of,
    unflatten,
    write_slices,
)
from nanoladder.parallel import Division, Sizes, WholeTensors, box_name, boxes

FOLDER = re.compile(r"step_\d{8,}\.slices\d*")
KIND = "a file of a checkpoint's slices"


def file_of(folder: Path, number: int) -> Path:
    """Returns the path of the file of slices with this number."""
    return folder / f"{number:05}.safetensors"


# -- writing


def write(folder: Path, number: int, slices: dict[str, torch.Tensor]) -> str:
    """Writes a file of slices, {name: CPU tensor}, to disk. Returns its header's digest. Raises OSError."""
    if not slices:
        return ""
    folder.mkdir(exist_ok=True)  # rank 0's may not be visible here yet
    with files.synced(file_of(folder, number)) as file:
        digest = write_slices(file, slices)
    files.sync_folder(folder)
    return digest


def require(folder: Path, headers: list[str]) -> None:
    """Raises OSError unless the files of slices are here: `out_dir` may not be on a disk that all processes share."""
    for number, digest in enumerate(headers):
        if digest:
            file_of(folder, number).stat()


def index_of(folder: Path, sizes: Sizes, headers: Iterable[str], tensors: WholeTensors) -> dict:
    """Returns a checkpoint's entry `slices`."""
    entries = {
        name: [dtype_name(tensors.shapes[name].dtype), stage, *division]
        for name, (stage, division) in tensors.divisions.items()
        if division.shape
    }
    return {"folder": folder.name, "sizes": sizes, "headers": [*headers], "tensors": entries}


# -- reading


def read(path: Path | str) -> tuple[dict, "SliceFiles | None"]:
    """Returns a checkpoint's dict and, if its model was divided, its SliceFiles, of which it has Sliced tensors.

    Tensors of a single file are memory-mapped. Raises OSError or ValueError as read_flat() does.
    """
    tensors, values = read_flat(path)
    if not (index := values.pop("slices", None)):
        return unflatten(tensors, values), None
    sizes, headers = Sizes(*index["sizes"]), index["headers"]
    if not FOLDER.fullmatch(index["folder"]) or len(headers) != math.prod(sizes) or min(sizes) < 1:
        raise ValueError("its index of slices does not fit together")
    found = SliceFiles(Path(path).with_name(index["folder"]), sizes, headers)
    sliced = {
        name: Sliced(found, name, DTYPES[dtype], stage, Division(tuple(shape), *cuts))
        for name, (dtype, stage, shape, *cuts) in index["tensors"].items()
    }
    return unflatten(tensors | sliced, values), found


class SliceFiles:
    """The files of slices of a checkpoint. sizes, headers: as in its index.

    A file is opened for each slice that is read; a slice is compared with its digest when it is read first.
    """

    def __init__(self, folder: Path, sizes: Sizes, headers: list[str]) -> None:
        self.folder, self.sizes, self.headers = folder, sizes, headers
        self.entries, self.verified = {}, set()  # {number: (end of the header, its entries)}, {(number, name)}

    def verify(self, rank: int, n: int) -> None:
        """Reads every n-th file, beginning with number `rank`. Raises Damaged or BadInput, as reading() does."""
        for number in range(rank, len(self.headers), n):
            for name in self.names(number):
                self.read(number, name)

    def names(self, number: int) -> Iterator[str]:
        if self.headers[number]:
            with opened(file_of(self.folder, number)) as file:
                names = self.header(number, file)[1].keys() - {"__metadata__"}
            yield from names

    def read(self, number: int, name: str) -> torch.Tensor:
        """Returns a slice, in memory. Raises Damaged unless it is as it was written, or BadInput, as reading() does."""
        with opened(file_of(self.folder, number)) as file:
            start, entries = self.header(number, file)
            begin, end = entries[name]["data_offsets"]
            file.seek(start + begin)
            if file.readinto(content := bytearray(end - begin)) < len(content):
                raise ValueError("it is incomplete")
            if (number, name) not in self.verified and sha256_of(content) != entries["__metadata__"][name]:
                raise ValueError(f"its {name} does not match its SHA-256")
            self.verified.add((number, name))
            return torch.frombuffer(content, dtype=DTYPES[entries[name]["dtype"]]).view(entries[name]["shape"])

    def header(self, number, file):
        """Returns the length of an open file's header, and its entries."""
        if number not in self.entries:
            text = file.read(8)
            text += file.read(min(int.from_bytes(text, "little"), MAX_HEADER))
            if sha256_of(text) != self.headers[number]:
                raise ValueError("its header does not match its SHA-256 in the checkpoint")
            self.entries[number] = len(text), json.loads(text[8:])
        return self.entries[number]


@contextlib.contextmanager
def opened(path):
    """Opens a file of slices. Turns any error while it is open into Damaged or BadInput, as reading() does."""
    with reading(path, KIND):
        files.size(path)  # raises for a pipe, which would block
        with open(path, "rb") as file:
            yield file


class Sliced:
    """A whole tensor of a checkpoint whose model was divided: tensor[0:64, 0:32] or tensor[...] reads its slices."""

    def __init__(
        self, found: SliceFiles, name: str, dtype: torch.dtype, stage: int, division: Division, shape: Any = None
    ) -> None:
        self.facts = found, name, dtype, stage, division
        self.dtype, self.shape = dtype, torch.Size(division.shape if shape is None else shape)

    def dim(self) -> int:
        return len(self.shape)

    def narrow(self, dim: int, start: int, length: int) -> "Sliced":
        """Returns the first rows, without reading them; dim and start have to be 0."""
        if (dim, start) != (0, 0):
            raise NotImplementedError("of a Sliced only the first rows")
        return Sliced(*self.facts, shape=[length, *self.shape[1:]])

    def __getitem__(self, index: Any) -> torch.Tensor:
        found, name, dtype, stage, division = self.facts
        given = index if isinstance(index, tuple) else () if index is ... else (index,)
        slices = [*given, *[slice(None)] * (self.dim() - len(given))]
        wanted = tuple(one.indices(length)[:2] for one, length in zip(slices, self.shape, strict=True))
        part = torch.empty([end - begin for begin, end in wanted], dtype=dtype)
        first = stage * found.sizes.shard * found.sizes.tensor  # number of the stage's files
        for number, there, source, target in overlaps(division, found.sizes, wanted):
            part[target] = found.read(first + number, box_name(name, there))[source]
        return part


@functools.lru_cache(4096)  # most tensors of a model have the shape of others
def overlaps(division, sizes, wanted):
    """Lists (number of a file in its stage, slices of the whole, and what overlaps: its slices of these and of wanted).

    wanted: ((begin, end), ...) of each dimension.
    """
    found = []
    for shard in range(1 if division.shard is None else sizes.shard):
        for tensor in range(1 if division.tensor is None else sizes.tensor):
            for _, there in boxes(division.ranges(sizes, shard, tensor)):
                both = [(max(a.start, begin), min(a.stop, end)) for a, (begin, end) in zip(there, wanted, strict=True)]
                if all(begin < end for begin, end in both):
                    source = tuple(slice(b - a.start, e - a.start) for (b, e), a in zip(both, there, strict=True))
                    target = tuple(slice(b - w, e - w) for (b, e), (w, _) in zip(both, wanted, strict=True))
                    found.append((shard * sizes.tensor + tensor, there, source, target))
    return found
