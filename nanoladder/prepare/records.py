"""Texts of records: a field of JSON lines, a column of Parquet files, or of datasets streamed from the hub."""

import importlib.util
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from nanoladder.errors import BadInput, reading
from nanoladder.prepare.corpus import Corpus, split_of
from nanoladder.prepare.sources import ADVICE, opened_bytes, separated

AT_ONCE = 256  # rows of a Parquet file in memory


class Records(Corpus):
    """Texts of the records of several sources, one source after the other: JsonLines, Parquet and Stream.

    field: the one that holds the text. A record whose text is null or blank is skipped. separator: if not empty, it
    separates documents within a text.
    """

    def __init__(self, sources: list, field: str = "text", val_fraction: float = 0.001, separator: str = "") -> None:
        self.sources, self.field, self.val_fraction = sources, field, val_fraction
        self.separator, self.announced = separator, False
        self.validation = f"the documents whose SHA-256 is below {val_fraction:g} of the largest"
        self.identity = [[source.identity for source in sources], field, self.validation, separator]

    def documents(self, place: list | None = None) -> Iterator[tuple[str, list[str]]]:
        first, place_there = place or (0, None)
        for index, source in enumerate(self.sources[first:], first):
            with reading(f"{source.name} cannot be read", ADVICE):
                for where, record in source.records(self.field, place_there):
                    texts = self.split(text_of(record, self.field, where), where)
                    for number, text in enumerate(texts, 1):
                        self.position = (index, source) if number == len(texts) else None
                        yield split_of(text, self.val_fraction), [text]
            place_there = None

    def split(self, text: str, where: str) -> list[str]:
        """Returns the documents in a text."""
        if not self.separator or self.separator not in text:
            return [text] if text else []
        if not self.announced:
            print(f"{where}: {self.separator!r} ends a document, here and below; --separator= keeps it as text")
        self.announced = True
        return ["".join(parts) for parts in separated([text], self.separator)]

    @property
    def place(self):
        """None between the documents of a record."""
        return self.position and [self.position[0], self.position[1].place]


def text_of(record, field, where):
    """Returns the text of a record, half surrogate pairs as U+FFFD; "" if it is null or blank. Raises BadInput."""
    if field not in record:
        raise BadInput(f"{where}: no field {field!r} among {sorted(record)[:9]}; set --field, or repair the record")
    text = record[field]
    if text is not None and not isinstance(text, str):
        raise BadInput(f"{where}: the field {field!r} holds {text!r:.40}; expected text: set --field, or repair it")
    if not text or not text.strip():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class JsonLines:
    """A file with a JSON object in each line. place: [bytes, lines] up to the end of the last record."""

    def __init__(self, path: Path) -> None:
        self.path, self.name, self.identity = path, str(path), identify(path)

    def records(self, field: str, place: list[int] | None) -> Iterator[tuple[str, dict]]:
        """Yields (name of the place, record) for each line that is not blank, or only for those after `place`."""
        n_bytes, n_lines = place or (0, 0)
        with opened_bytes(self.path) as file:
            file.seek(n_bytes)
            for number, line in enumerate(file, n_lines + 1):
                n_bytes += len(line)
                self.place = [n_bytes, number]
                if line.strip():
                    where = f"{self.path} line {number}"
                    yield where, parse(line, where)


def parse(line, where):
    """Returns the object in a line of JSON. Raises BadInput."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: not JSON ({error}); expected an object a line; --as_text reads all as text") from None
    if not isinstance(record, dict):
        raise BadInput(f"{where}: {record!r:.40}; expected a JSON object a line; --as_text reads all as text")
    return record


class Parquet:
    """A Parquet file. place: the number of rows up to the last record."""

    def __init__(self, path: Path) -> None:
        if not importlib.util.find_spec("pyarrow"):
            raise BadInput(f"{path}: needs the package pyarrow; install it (pip install pyarrow)")
        self.path, self.name, self.identity = path, str(path), identify(path)

    def records(self, field: str, place: int | None) -> Iterator[tuple[str, dict]]:
        """Yields (name of the place, record) for each row, or only for those after `place`."""
        from pyarrow.parquet import ParquetFile

        with ParquetFile(self.path, pre_buffer=False, buffer_size=2**20) as file:
            text_of(dict.fromkeys(file.schema_arrow.names), field, self.path)  # refuses a missing column
            batches = file.iter_batches(AT_ONCE, columns=[field], use_threads=False)
            rows = (record for batch in batches for record in batch.to_pylist())
            for self.place, record in islice(enumerate(rows, 1), place, None):
                yield f"{self.path} row {self.place}", record


class Stream:
    """A dataset that the package `datasets` streams. arguments: dict for load_dataset, such as {"path": "NAME"}."""

    def __init__(self, arguments: dict) -> None:
        self.identity, self.name = arguments, arguments["path"]
        if not importlib.util.find_spec("datasets"):
            raise BadInput(f"{self.name}: needs the package datasets; install it (pip install datasets)")

    def records(self, field: str, place: dict | None) -> Iterator[tuple[str, dict]]:
        """Yields (name of the dataset, record) for each record, or only for those after `place`."""
        self.stream = load(self.identity)
        if place:
            self.stream.load_state_dict(place)
        for record in self.stream:
            yield self.name, record

    @property
    def place(self):
        return self.stream.state_dict()


def identify(path):
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]


def load(arguments):
    from datasets import load_dataset
    from datasets.utils import logging as datasets_logging
    from huggingface_hub.utils import logging as hub_logging

    for logging in (datasets_logging, hub_logging):
        logging.set_verbosity(50)  # the library logs every retry; here a failure is one line
    return load_dataset(**arguments, split="train", streaming=True)
