"""Corpora of any size: text files, and records that the package `datasets` streams from files or the hub."""

import contextlib
import hashlib
import importlib.util
from pathlib import Path
from typing import NamedTuple

from nanoladder.data.corpus import Corpus, lowest, split_of
from nanoladder.errors import BadInput, reading

PART = 2**20  # characters read at a time
ADVICE = "check the file, or the network, and repeat the command: encoded documents are kept"


class TextFile(NamedTuple):
    """A UTF-8 text file."""

    path: Path
    sha256: str  # of the text
    n_characters: int

    def characters(self, start, end):
        """Yields the text's characters from start to end, in parts."""
        place = 0
        with opened(self.path) as file:
            while place < end and (part := file.read(PART)):
                yield part[max(0, start - place) : max(0, end - place)]
                place += len(part)

    def lines(self):
        """Yields the nonblank lines, without line ends."""
        with opened(self.path) as file:
            yield from (line.rstrip("\r\n") for line in file if line.strip())


def find_text(path):
    """Returns the TextFile at a path; None if its bytes are not UTF-8 or some are zero. Raises BadInput."""
    digest, n_characters = hashlib.sha256(), 0
    with opened(path) as file, contextlib.suppress(UnicodeDecodeError):
        while part := file.read(PART):
            if "\0" in part:
                return None
            digest.update(part.encode())
            n_characters += len(part)
        return TextFile(path, digest.hexdigest(), n_characters)
    return None


@contextlib.contextmanager
def opened(path):
    """Yields an open text file, line ends unchanged, byte order mark skipped. Turns any error into BadInput."""
    with reading(f"{path} cannot be read", ADVICE), open(path, encoding="utf-8-sig", newline="\n") as file:
        yield file


class Files(Corpus):
    """Documents of text files, a list of TextFile. documents: "lines" (each line), "files" (each file) or "none".

    With "none", a single file is split near its end: the last val_fraction of its characters are val.
    """

    def __init__(self, files, documents, val_fraction):
        self.files, self.val_fraction = files, val_fraction
        self.lines, self.cut = documents == "lines", documents == "none" and len(files) == 1
        if self.cut:
            self.validation = f"the last {val_fraction:g} of the characters"
        elif self.lines:
            self.validation = f"the documents whose SHA-256 is below {val_fraction:g} of the largest"
        else:
            self.val = lowest([file.sha256 for file in files], val_fraction)
            self.validation = f"the {val_fraction:g} of the documents whose SHA-256 is lowest"
        self.identity = [[file.sha256 for file in files], self.validation]

    def read(self):
        for number, file in enumerate(self.files):
            if self.cut:
                place = int(file.n_characters * (1 - self.val_fraction))
                yield "train", file.characters(0, place)
                yield "val", file.characters(place, file.n_characters)
            elif self.lines:
                yield from ((split_of(line, self.val_fraction), [line]) for line in file.lines())
            else:
                yield "val" if number in self.val else "train", file.characters(0, file.n_characters)


class Records(Corpus):
    """Texts of records from several streams of the package `datasets`, one stream after the other.

    streams: list of dicts, arguments of load_dataset such as {"path": "HuggingFaceFW/fineweb-edu", "name": ...}, or
    {"path": "json", "data_files": [FILE]}. field: the column that holds the text.
    """

    def __init__(self, streams, field="text", val_fraction=0.001):
        if not importlib.util.find_spec("datasets"):
            raise BadInput(f"{name_of(streams[0])}: needs the package datasets; install it (pip install datasets)")
        self.streams, self.field, self.val_fraction = streams, field, val_fraction
        self.validation = f"the documents whose SHA-256 is below {val_fraction:g} of the largest"
        stamps = [Path(file).stat().st_mtime_ns for stream in streams for file in stream.get("data_files", [])]
        self.identity = [streams, stamps, field, self.validation]

    def documents(self, place=None):
        for position, text in self.texts(*(place or (0, None))):
            self.position = position
            yield split_of(text, self.val_fraction), [text]

    @property
    def place(self):
        index, stream = self.position
        return [index, stream.state_dict()]

    def texts(self, first=0, state=None):
        """Yields ((stream's index, stream), text) for each nonblank record, beginning at stream `first` in `state`."""
        for index, arguments in enumerate(self.streams[first:], first):
            with reading(f"{name_of(arguments)} cannot be read", ADVICE):
                stream = load(arguments)
                if state:
                    stream.load_state_dict(state)
                    state = None
                for record in stream:
                    text = record.get(self.field)
                    if not isinstance(text, str):
                        reason = f"no text in the field {self.field!r} of a record with the fields {sorted(record)[:9]}"
                        raise BadInput(f"{name_of(arguments)}: {reason}; set --field, or repair it")
                    if text.strip():
                        yield (index, stream), text


def name_of(stream):
    return " ".join(stream.get("data_files", [stream["path"]]))


def load(arguments):
    from datasets import load_dataset
    from datasets.utils import logging as datasets_logging
    from huggingface_hub.utils import logging as hub_logging

    for logging in (datasets_logging, hub_logging):
        logging.set_verbosity(50)  # the library logs every retry; here a failure is one line
    return load_dataset(**arguments, split="train", streaming=True)
