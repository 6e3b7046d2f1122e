"""Files of a corpus of any size: their kinds, and the texts. records.py reads the other kinds."""

import codecs
import contextlib
import gzip
import hashlib
import io
import json
import shlex
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from nanoladder.errors import BadInput, reading
from nanoladder.prepare.corpus import Corpus, lowest, split_of

PART = 2**20  # characters read at a time
LONGEST_LINE = 2**26  # bytes of a first line that are read to find a file's kind
JSON, TABLES = (".json", ".jsonl", ".ndjson"), (".csv", ".tsv")
ADVICE = "check the file, or the network, and repeat the command: encoded documents are kept"


@contextlib.contextmanager
def opened_bytes(path):
    """Yields an open binary file; if its contents are gzip's, whatever its name, then decompressed."""
    with open(path, "rb") as file:
        yield gzip.GzipFile(fileobj=file) if file.peek(2).startswith(b"\x1f\x8b") else file


def kind_of(path: Path) -> str:
    """Returns "json" (an object a line), "parquet" or "text", by a file's contents, or a name that promises records.

    Raises BadInput for a table or a JSON array, and the command that converts it.
    """
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    with reading(f"{path} cannot be read", ADVICE), opened_bytes(path) as file:
        lines = iter(lambda: file.readline(LONGEST_LINE), b"")
        line = next((line for line in lines if line.strip()), b"").removeprefix(codecs.BOM_UTF8).lstrip()
    if line.startswith(b"PAR1") or suffix == ".parquet":
        return "parquet"
    if suffix in TABLES:
        dialect = ", dialect=csv.excel_tab" * (suffix == ".tsv")
        raise not_lines(path, "a table", f"csv.field_size_limit(2**30); rows = csv.DictReader(sys.stdin{dialect})")
    if suffix in JSON and line.startswith(b"["):
        raise not_lines(path, "a JSON array", "rows = json.load(sys.stdin)")
    return "json" if suffix in JSON or is_object(line) else "text"


def not_lines(path, kind, code):
    """Returns a BadInput for a file that Python code reads from stdin into `rows`."""
    file, lines = shlex.quote(str(path)), shlex.quote(str(path.with_suffix(".jsonl")))
    code = f'python -c "import csv, json, sys; {code}; [print(json.dumps(row)) for row in rows]"'
    command = f"gzip -dc {file} | {code}" if path.suffix.lower() == ".gz" else f"{code} < {file}"
    return BadInput(f"{path} is {kind}; make JSON lines of it: {command} > {lines}; or read it as text: --as_text")


def is_object(line):
    """Returns True if the bytes are a JSON object."""
    with contextlib.suppress(ValueError, RecursionError):
        return line.startswith(b"{") and isinstance(json.loads(line), dict)
    return False


class TextFile(NamedTuple):
    """A UTF-8 text file."""

    path: Path
    sha256: str  # of the text
    n_characters: int
    n_separators: int = 0

    def characters(self, start, end):
        """Yields the text's characters from start to end, in parts."""
        place = 0
        with opened(self.path) as file:
            while place < end and (part := file.read(PART)):
                yield part[max(0, start - place) : max(0, end - place)]
                place += len(part)

    def texts(self, separator, start, end):
        """Yields an iterable of parts for each text between separators, of the characters from start to end."""
        parts = self.characters(start, end)
        return separated(parts, separator) if self.n_separators else iter([parts])

    def lines(self, separator):
        """Yields the nonblank lines, without line ends and separators."""
        with opened(self.path) as file:
            for line in file:
                for text in line.split(separator) if self.n_separators else [line]:
                    if text.strip():
                        yield text.rstrip("\r\n")

    def after_separator(self, place, separator):
        """Returns a place in the characters, or if a separator spans it, the place after that."""
        start = max(0, place - len(separator) + 1)
        if self.n_separators:
            around = "".join(self.characters(start, place + len(separator) - 1))
            if separator in around:
                return start + around.index(separator) + len(separator)
        return place


def find_text(path: Path, separator: str = "") -> TextFile | None:
    """Returns the TextFile at a path; None if its bytes are not UTF-8 or some are zero. Raises BadInput."""
    digest, n_characters, n_separators, end = hashlib.sha256(), 0, 0, ""
    with opened(path) as file, contextlib.suppress(UnicodeDecodeError):
        while part := file.read(PART):
            if "\0" in part:
                return None
            digest.update(part.encode())
            n_characters += len(part)
            if separator:
                pieces = (end + part).split(separator)
                n_separators += len(pieces) - 1
                end = tail(pieces[-1], len(separator) - 1)
        return TextFile(path, digest.hexdigest(), n_characters, n_separators)
    return None


def separated(parts, separator):
    """Yields an iterable of parts for each nonblank text between separators, without whitespace at its beginning."""

    def numbered():
        number, started, rest = 0, False, ""  # the rest may be the beginning of a separator
        for part in parts:
            texts = (rest + part).split(separator)
            rest = tail(texts[-1], len(separator) - 1)
            texts[-1] = texts[-1].removesuffix(rest)
            for index, text in enumerate(texts):
                if index:
                    number, started = number + 1, False
                if text := text if started else text.lstrip():
                    started = True
                    yield number, text
        if rest := rest if started else rest.lstrip():
            yield number, rest

    return ((text for _, text in group) for _, group in groupby(numbered(), key=itemgetter(0)))


def tail(text, size):
    return text[max(0, len(text) - size) :]


@contextlib.contextmanager
def opened(path):
    """Yields an open text file, line ends unchanged, byte order mark skipped. Turns any error into BadInput."""
    with reading(f"{path} cannot be read", ADVICE), opened_bytes(path) as file:
        yield io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n")


class Files(Corpus):
    """Documents of text files, a list of TextFile. documents: "lines" (each line), "files" (each file) or "none".

    A separator, found when the files were, ends a document, too. "none", a single file: the last val_fraction of its
    characters are val.
    """

    def __init__(self, files: list[TextFile], documents: str, val_fraction: float, separator: str = "") -> None:
        self.files, self.val_fraction, self.separator = files, val_fraction, separator
        self.lines, self.cut = documents == "lines", documents == "none" and len(files) == 1
        self.each = self.lines or (documents == "files" and any(file.n_separators for file in files))
        if self.cut:
            self.validation = f"the last {val_fraction:g} of the characters"
        elif self.each:
            self.validation = f"the documents whose SHA-256 is below {val_fraction:g} of the largest"
        else:
            self.val = lowest([file.sha256 for file in files], val_fraction)
            self.validation = f"the {val_fraction:g} of the documents whose SHA-256 is lowest"
        self.identity = [[file.sha256 for file in files], self.validation, separator]

    def read(self) -> Iterator[tuple[str, Iterable[str]]]:
        for number, file in enumerate(self.files):
            if self.each:
                texts = file.texts(self.separator, 0, file.n_characters)
                for text in file.lines(self.separator) if self.lines else map("".join, texts):
                    yield split_of(text, self.val_fraction), [text]
                continue
            for split, start, end in self.spans(number, file):
                for parts in file.texts(self.separator, start, end):
                    yield split, parts

    def spans(self, number, file):
        """Returns (split, start, end) for each part of a file's characters."""
        n_characters = file.n_characters
        if not self.cut:
            return [("val" if number in self.val else "train", 0, n_characters)]
        place = file.after_separator(int(n_characters * (1 - self.val_fraction)), self.separator)
        return [("train", 0, place), ("val", place, n_characters)]
