"""Corpora of any size: text files, and records that the package `datasets` streams from files or its hub."""

import contextlib
import gzip
import hashlib
import importlib.util
import zlib
from pathlib import Path
from typing import NamedTuple

from nanoladder.data.corpus import HEAD, Corpus, describe_validation, find_threshold, sha256_of, split_of
from nanoladder.errors import BadInput

PART = 2**20  # characters read at a time


class TextFile(NamedTuple):
    """A file of text in UTF-8, also compressed by gzip."""

    path: Path
    sha256: str  # of the text, as the numbers
    n_characters: int
    n_bytes: int

    def characters(self, start, end):
        """Yields parts of the text: its characters from start to end."""
        place = 0
        with opened(self.path) as file:
            while place < end and (part := file.read(PART)):
                yield part[max(0, start - place) : max(0, end - place)]
                place += len(part)
        if place < end:
            raise BadInput(f"{self.path} changed while it was read; leave it as it is and prepare the dataset again")

    def lines(self):
        """Yields the lines that are more than space, without their ends."""
        with opened(self.path) as file:
            for line in file:
                if line.strip():
                    yield line.rstrip("\n").rstrip("\r")


def find_text(path):
    """The TextFile at a path; None if it has other bytes than UTF-8, or zero bytes."""
    digest, n_characters, n_bytes = hashlib.sha256(), 0, 0
    try:
        with opened(path) as file:
            while part := file.read(PART):
                if "\0" in part:
                    return None
                content = part.encode()
                digest.update(content)
                n_characters, n_bytes = n_characters + len(part), n_bytes + len(content)
    except UnicodeDecodeError:
        return None
    return TextFile(path, digest.hexdigest(), n_characters, n_bytes)


@contextlib.contextmanager
def opened(path):
    """Yields a text file, decompressed, its line ends as they are. Raises BadInput if it cannot be read."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{path} cannot be read to its end ({reason}); expected a whole file; prepare again") from None


class Files(Corpus):
    """The documents of text files, a list of TextFile: each line if `lines`, else each file.

    cut: a single file is cut at its end instead: the last val_fraction of its characters are val.
    """

    def __init__(self, files, lines=False, val_fraction=0.1, cut=True):
        self.files, self.lines = files, lines
        self.n_bytes = sum(file.n_bytes for file in files)
        self.cut = None
        if cut and not lines and len(files) == 1:
            self.cut = int(files[0].n_characters * (1 - val_fraction))
            self.validation = f"the last {val_fraction:g} of the characters"
        else:
            sizes = ((digest, len(parts[0]) if lines else 0) for digest, parts in self.digests())
            self.threshold = find_threshold(sizes, val_fraction)
            self.validation = describe_validation(val_fraction)
        self.identity = [[file.sha256 for file in files], lines, self.cut or self.threshold]

    def digests(self):
        """Yields (SHA-256, parts of the text) for each document."""
        for file in self.files:
            if self.lines:
                yield from ((sha256_of(line), [line]) for line in file.lines())
            else:
                yield file.sha256, file.characters(0, file.n_characters)

    def read(self):
        if self.cut is not None:
            (file,) = self.files
            yield "train", file.characters(0, self.cut)
            yield "val", file.characters(self.cut, file.n_characters)
            return
        for number, (digest, parts) in enumerate(self.digests()):
            yield split_of(digest, number, self.threshold), parts


class Records(Corpus):
    """The texts of records, one after the other from several streams of the package `datasets`.

    streams: list of dicts, arguments of load_dataset such as {"path": "HuggingFaceFW/fineweb-edu", "name": ...}, or
    {"path": "json", "data_files": [FILE]}. field: the column that holds the text. head: as in find_threshold.
    """

    def __init__(self, streams, field="text", val_fraction=0.001, head=HEAD):
        if not importlib.util.find_spec("datasets"):
            raise BadInput(f"{name_of(streams[0])}: needs the package datasets; install it (pip install datasets)")
        self.streams, self.field = streams, field
        digests = ((sha256_of(text), len(text.encode())) for _, text in self.texts())
        self.threshold = find_threshold(digests, val_fraction, head)
        self.validation = describe_validation(val_fraction)
        stamps = [Path(file).stat().st_mtime_ns for stream in streams for file in stream.get("data_files", [])]
        self.identity = [streams, stamps, field, self.threshold]

    def documents(self, place=None):
        first, state, done = place or (0, None, 0)
        for number, (position, text) in enumerate(self.texts(first, state), done):
            self.position = position, number + 1
            yield split_of(sha256_of(text), number, self.threshold), [text]

    @property
    def place(self):
        (index, stream), number = self.position
        return [index, stream.state_dict(), number]

    def texts(self, first=0, state=None):
        """Yields ((index of the stream, the stream), text) for each record with a text, from the state of one on."""
        for index, arguments in enumerate(self.streams[first:], first):
            with reaching(name_of(arguments)):
                stream = load(arguments)
                if state:
                    stream.load_state_dict(state)
                    state = None
                for record in stream:
                    text = record.get(self.field)
                    if not isinstance(text, str):
                        reason = f"no text in the field {self.field!r} of a record of {sorted(record)[:9]}"
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
        logging.set_verbosity(50)  # they tell every retry; a failure is one line here
    return load_dataset(**arguments, split="train", streaming=True)


@contextlib.contextmanager
def reaching(name):
    """Raises BadInput for whatever goes wrong with a stream, which has many layers."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInput(
            f"{name} cannot be read ({reason:.300}); check the file, or the network, and give the same command again: "
            "what is encoded is kept"
        ) from None
