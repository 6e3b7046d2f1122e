"""A corpus: documents in a fixed order, each in train or val, that pass through bounded memory as pieces of text.

Which documents are val depends on their contents alone, on neither their order nor the number of processes: those whose
SHA-256 is lowest. Of a corpus of up to 64 MB of text that is the exact fraction of their number; of a larger one, it is
every document whose SHA-256, as a fraction of 2^256, is below val_fraction.
"""

import hashlib
import json
import re
from typing import NamedTuple

from nanoladder.errors import BadInput

BLOCK = 2**20  # characters encoded at a time
LONGEST_BLOCK = 2**22  # if no safe cut comes, the text is cut here all the same
HEAD = 2**26  # bytes of text within which the exact fraction of the documents is val

# After a single newline, or before a single space: no token of a tokenizer here reaches across.
SAFE_CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")


class Piece(NamedTuple):
    """A stretch of a document, of about BLOCK characters unless it is the last."""

    split: str
    text: str
    first: bool
    last: bool


class Corpus:
    """Documents that are read in a fixed order, from the start or from a place.

    A subclass has documents(place), which yields (split, iterable of the parts of a document's text) and keeps
    self.place, the place of the document being read, and self.following, the place after it. Places are JSON values.

    identity: a JSON value that tells the corpus, and its split, from any other. validation: a sentence for meta.json
    that says which part is val. n_bytes: of the input, None if unknown; bytes_read: so far.
    """

    identity = validation = place = following = n_bytes = None
    bytes_read = n_pieces = 0

    def pieces(self, position=None):
        """Yields the Pieces of all documents, or those after a position()."""
        place, skip = position or (None, 0)
        for split, parts in self.documents(place):
            for number, (text, last) in enumerate(mark_last(blocks(parts))):
                if number >= skip:
                    self.n_pieces = 0 if last else number + 1
                    yield Piece(split, text, number == 0, last)
            skip = 0

    def position(self):
        """The position after the last piece that pieces() has yielded: a JSON value."""
        return [self.place, self.n_pieces] if self.n_pieces else [self.following, 0]

    def documents(self, place):
        raise NotImplementedError


class Texts(Corpus):
    """Texts in memory: two lists of str, each of them a document."""

    def __init__(self, train, val):
        self.texts = [("train", text) for text in train] + [("val", text) for text in val]
        self.n_bytes = sum(len(text.encode()) for _, text in self.texts)
        self.identity = sha256_of(json.dumps(self.texts))

    def documents(self, place):
        self.bytes_read = sum(len(text.encode()) for _, text in self.texts[: place or 0])
        for number in range(place or 0, len(self.texts)):
            self.place, self.following = number, number + 1
            split, text = self.texts[number]
            yield split, [text]
            self.bytes_read += len(text.encode())


def blocks(parts):
    """Joins the parts of a text and cuts it into blocks of about BLOCK characters, encoded one by one to the same ids.

    Text without a place where it is safe to cut, such as a line without spaces, is cut after LONGEST_BLOCK characters;
    the ids there may differ from those of the whole.
    """
    rest = ""
    for part in parts:
        text, start = rest + part, 0
        while len(text) - start > BLOCK:
            cut = SAFE_CUT.search(text, start + BLOCK, start + LONGEST_BLOCK)
            if not cut and len(text) - start < LONGEST_BLOCK:
                break
            end = cut.start() if cut else start + LONGEST_BLOCK
            yield text[start:end]
            start = end
        rest = text[start:]
    if rest:
        yield rest


def mark_last(blocks):
    """Yields (block, True if it is the last one) for each block; of no blocks at all, a single empty one."""
    blocks = iter(blocks)
    block = next(blocks, "")
    for following in blocks:
        yield block, False
        block = following
    yield block, True


def sha256_of(text):
    return hashlib.sha256(text.encode()).hexdigest()


def find_threshold(documents, val_fraction, head=HEAD):
    """Finds the least (digest, number) of a document that is not val; all below are, and they are at least one.

    documents: iterable of (SHA-256 in hex, bytes of text that finding it out takes), read no further than `head` bytes.
    Raises BadInput for less than two documents.
    """
    found, n_bytes = [], 0
    for number, (digest, size) in enumerate(documents):
        found.append((digest, number))
        n_bytes += size
        if n_bytes > head and number:
            return max((f"{int(val_fraction * 2**256):064x}", 0), sorted(found)[1])
    require_text(found)
    if len(found) < 2:
        raise BadInput("the text is a single document, but train and val need one each; give more text")
    n_val = min(max(1, round(len(found) * val_fraction)), len(found) - 1)
    return sorted(found)[n_val]


def describe_validation(val_fraction):
    """The rule of find_threshold, for meta.json."""
    return f"the {val_fraction:g} of the documents whose SHA-256 is lowest"


def split_documents(documents, val_fraction, keys=None):
    """Splits documents into (train, val), each in the given order; val gets those whose keys hash lowest.

    documents: list of str. val_fraction: the part of their number that val gets, at least one document.
    keys: list of str, one for each (default: the documents). Equal keys land on the same side, except at the edge.
    """
    digests = [sha256_of(key) for key in keys or documents]
    threshold = find_threshold(((digest, 0) for digest in digests), val_fraction)
    train, val = [], []
    for number, (digest, document) in enumerate(zip(digests, documents, strict=True)):
        (val if (digest, number) < threshold else train).append(document)
    return train, val


def require_text(found):
    if not found:
        raise BadInput("the text is empty; expected some to learn from")


def split_text(text, val_fraction):
    """Splits a text into ([train], [val]); val is the last val_fraction of its characters."""
    require_text(text)
    cut = int(len(text) * (1 - val_fraction))
    return [text[:cut]], [text[cut:]]
