"""Files of a corpus of any size: the kinds that there are, and the texts. records.py reads the other kinds."""

import codecs
import contextlib
import gzip
import hashlib
import io
import json
import shlex
from pathlib import Path
from typing import NamedTuple

from nanoladder.data.corpus import Corpus, lowest, split_of
from nanoladder.errors import BadInput, reading

PART = 2**20  # characters read at a time
LONGEST_LINE = 2**26  # bytes of a first line that are read to find a file's kind
JSON, TABLES = (".json", ".jsonl", ".ndjson"), (".csv", ".tsv")
ADVICE = "check the file, or the network, and repeat the command: encoded documents are kept"


@contextlib.contextmanager
def opened_bytes(path):
    """Yields an open binary file; if its contents are gzip's, whatever its name, then decompressed."""
    with open(path, "rb") as file:
        yield gzip.GzipFile(fileobj=file) if file.peek(2).startswith(b"\x1f\x8b") else file


def kind_of(path):
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


def not_lines(path, found, code):
    """Returns a BadInput for a file that Python code reads from stdin into `rows`."""
    file, lines = shlex.quote(str(path)), shlex.quote(str(path.with_suffix(".jsonl")))
    code = f'python -c "import csv, json, sys; {code}; [print(json.dumps(row)) for row in rows]"'
    command = f"gzip -dc {file} | {code}" if path.suffix.lower() == ".gz" else f"{code} < {file}"
    return BadInput(f"{path} is {found}; make JSON lines of it: {command} > {lines}; or read it as text: --as_text")


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
    with reading(f"{path} cannot be read", ADVICE), opened_bytes(path) as file:
        yield io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n")


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
