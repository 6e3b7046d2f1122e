"""Corpora in files: text, .jsonl and .parquet, also compressed, of any size.

Text files are read twice: once for their size, their digest and to see that they are text, once to encode them. A file
that changes in between, or vanishes, ends the program with one line.
"""

import codecs
import gzip
import hashlib
import io
import json
import os
import zlib
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from nanoladder.data.corpus import Corpus, describe_validation, find_threshold, sha256_of
from nanoladder.errors import BadInput

PART = 2**20  # bytes read at a time
LONGEST_LINE = 2**26  # bytes: a line is held in memory
ROWS = 256  # of a .parquet file, held in memory


class File(NamedTuple):
    """A file of a corpus as it was found."""

    path: Path
    size: int
    modified_ns: int
    sha256: str | None = None  # of its text; records have one each instead
    n_characters: int = 0


class Files(Corpus):
    """The documents of files.

    files: list of File. field: of a .jsonl file, or the column of a .parquet file, that holds the text of a document.
    lines: True if each line of a text file is a document; else each text file is one.
    cut: a single text file is cut at its end: the last val_fraction of its characters are val.
    """

    def __init__(self, files, field="text", lines=False, val_fraction=0.1, cut=True):
        self.files, self.field, self.lines = files, field, lines
        self.n_bytes = sum(file.size for file in files)
        self.bytes_before, self.raw, self.size = 0, None, 0  # for bytes_read: the files before, the open one, its size
        self.cut = None
        if cut and not lines and len(files) == 1 and files[0].sha256:
            self.cut = int(files[0].n_characters * (1 - val_fraction))
            self.validation = f"the last {val_fraction:g} of the characters"
        else:
            self.threshold = find_threshold(self.digests(), val_fraction)
            self.validation = describe_validation(val_fraction)
        listed = [[str(file.path), file.size, file.modified_ns] for file in files]
        self.identity = [listed, field, lines, self.cut or self.threshold]

    @property
    def bytes_read(self):
        """Bytes of the files read so far, as they are on disk."""
        return self.bytes_before + (self.size if self.raw is None or self.raw.closed else self.raw.tell())

    def digests(self):
        """Yields (SHA-256, bytes of text held in memory) for each document."""
        for file in self.files:
            for digest, parts in self.read(file):
                yield digest, 0 if file.sha256 and not self.lines else len(parts[0].encode())

    def documents(self, place):
        first, done, number = place or (0, 0, 0)
        before = sum(file.size for file in self.files[:first])
        for index, file in enumerate(self.files[first:], first):
            self.bytes_before, self.raw, self.size = before, None, 0
            before += file.size
            for k, (split, parts) in enumerate(self.split(file, number - done)):
                if k >= done:
                    self.place, self.following = [index, k, number], [index, k + 1, number + 1]
                    yield split, parts
                    number += 1
            done = 0

    def split(self, file, number):
        """Yields (split, parts) for each document of a file, the first of which has that number."""
        if self.cut is not None:
            yield "train", self.characters(file, 0, self.cut)
            yield "val", self.characters(file, self.cut, file.n_characters)
            return
        for digest, parts in self.read(file):
            yield "val" if (digest, number) < tuple(self.threshold) else "train", parts
            number += 1

    def read(self, file):
        """Yields (SHA-256, parts of the text) for each document of a file."""
        if file.sha256 and not self.lines:
            yield file.sha256, self.characters(file, 0, file.n_characters)
            return
        kind, _ = kind_of(file.path)
        read = {"text": self.read_lines, "jsonl": self.read_records, "parquet": self.read_rows}[kind]
        for text in read(file):
            if text.strip():
                yield sha256_of(text), [text]

    def characters(self, file, start, end):
        """Yields parts of the text of a file: its characters from start to end."""
        place = 0
        with self.reading(file) as stream:
            for text in decoded(stream):
                yield text[max(0, start - place) : max(0, end - place)]
                place += len(text)
                if place >= end:
                    return

    def read_lines(self, file):
        """Yields the lines of a text file, without their ends."""
        with self.reading(file) as stream:
            for _, line in numbered_lines(stream, file.path):
                yield line.decode("utf-8-sig").rstrip("\n").rstrip("\r")

    def read_records(self, file):
        """Yields the text of each line of a .jsonl file. Raises BadInput: names the first broken line."""
        with self.reading(file) as stream:
            for number, line in numbered_lines(stream, file.path):
                if line.strip():
                    try:
                        record = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise BadInput(f"{file.path}, line {number}: not JSON ({error}); repair or remove it") from None
                    yield text_of(record, self.field, f"{file.path}, line {number}")

    def read_rows(self, file):
        """Yields the text of each row of a .parquet file."""
        parquet = import_pyarrow(file.path).parquet
        with self.reading(file) as stream:
            table = parquet.ParquetFile(stream)
            if self.field not in table.schema_arrow.names:
                names = ", ".join(table.schema_arrow.names)
                raise BadInput(f"{file.path} has no column {self.field!r}, only {names:.200}; set --field")
            batches = table.iter_batches(ROWS, columns=[self.field], use_threads=False)
            texts = chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
            for number, text in enumerate(texts, 1):
                yield text_of({self.field: text}, self.field, f"{file.path}, row {number}")

    @contextmanager
    def reading(self, file):
        """Opens a file, decompressed. Raises BadInput if it is not as it was found, before or after it is read."""
        with opened(file.path) as (raw, stream):
            self.raw, self.size = raw, file.size
            self.require_same(raw, file)
            try:
                yield stream
            except BadInput:  # such as half a line, if the file has become shorter
                self.require_same(raw, file)
                raise
            self.require_same(raw, file)

    def require_same(self, raw, file):
        if found(raw, file.path)[:3] != file[:3]:
            raise BadInput(f"{file.path} changed while it was read; leave it as it is and prepare the dataset again")


def found(raw, path):
    """The File that an open file is."""
    status = os.fstat(raw.fileno())
    return File(path, status.st_size, status.st_mtime_ns)


def kind_of(path):
    """("text", "jsonl" or "parquet"; "", ".gz" or ".zst"): by the ends of the name."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in (".gz", ".zst") else ""
    kind = {".jsonl": "jsonl", ".parquet": "parquet"}.get(suffixes[-1] if suffixes else "", "text")
    return kind, compression


@contextmanager
def opened(path):
    """Yields an open file and the stream of its bytes, decompressed. Raises BadInput for a file that cannot be read."""
    _, compression = kind_of(path)
    try:
        with open(path, "rb", buffering=PART) as raw:
            if compression == ".gz":
                yield raw, gzip.GzipFile(fileobj=raw)
            elif compression == ".zst":
                stream = import_pyarrow(path).CompressedInputStream(raw, "zstd")
                yield raw, io.BufferedReader(stream, PART)
            else:
                yield raw, raw
    except (OSError, EOFError, ValueError, zlib.error) as error:  # pyarrow's errors are among them
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{path} cannot be read to its end ({reason}); expected a whole file; prepare again") from None


def import_pyarrow(path):
    """The package pyarrow, with its part for .parquet. Raises BadInput if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BadInput(f"{path}: needs the package pyarrow; install it (pip install pyarrow)") from None
    return pyarrow


def decoded(stream):
    """Yields the text of a stream in parts. Raises UnicodeDecodeError, a ValueError."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    while part := stream.read(PART):
        yield decoder.decode(part)
    decoder.decode(b"", final=True)


def numbered_lines(stream, path):
    """Yields (number from 1, bytes of the line with its end). Raises BadInput for an endless line."""
    number = 0
    while line := stream.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE:
            raise BadInput(f"{path}, line {number}: longer than {LONGEST_LINE >> 20} MB; expected shorter documents")
        yield number, line


def text_of(record, field, place):
    """The text in a record's field; half a surrogate pair, which JSON can hold but no UTF-8, becomes U+FFFD."""
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        known = sorted(record)[:9] if isinstance(record, dict) else f"a {type(record).__name__}"
        raise BadInput(f"{place}: no text in the field {field!r}, only {known}; set --field, or repair it")
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def find_file(path):
    """The File at a path; None if it should be text but is not, having other bytes than UTF-8, or zero bytes."""
    with opened(path) as (raw, stream):
        file = found(raw, path)
        if kind_of(path)[0] != "text":
            return file
        digest, n_characters = hashlib.sha256(), 0
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        bar = {"unit": "B", "unit_scale": True, "delay": 1, "disable": None}
        with tqdm(total=file.size, desc=f"reading {path.name}", **bar) as progress:
            try:
                while part := stream.read(PART):
                    if b"\0" in part:
                        return None
                    n_characters += len(decoder.decode(part))
                    digest.update(part)
                    progress.update(raw.tell() - progress.n)
                decoder.decode(b"", final=True)
            except UnicodeDecodeError:
                return None
    return file._replace(sha256=digest.hexdigest(), n_characters=n_characters)
