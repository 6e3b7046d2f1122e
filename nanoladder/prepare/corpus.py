"""A corpus: documents in a fixed order, each in train or val, read as pieces of text in bounded memory.

The documents whose SHA-256 is lowest are val, so the split depends only on their contents, not on their order or the
number of threads.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from nanoladder.errors import BadInput

BLOCK = 2**20  # characters encoded at a time
LONGEST_BLOCK = 2**22  # if no safe cut comes, the text is cut here all the same

# After a single newline, or before a single space: no token of any tokenizer here spans these places.
SAFE_CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")


class Piece(NamedTuple):
    """A stretch of a document, of about BLOCK characters unless it is the last."""

    split: str
    text: str
    first: bool
    last: bool


class Corpus:
    """Documents read in a fixed order, from the start or from a given place.

    A subclass has read(), which yields (split, iterable of the parts of a document's text), and
    identity: a JSON value that distinguishes the corpus and its split from any other.
    validation: a sentence for meta.json that says which part is val.
    place: the place after the last document yielded, a JSON value.
    """

    identity = validation = place = None

    def documents(self, place=None):
        """Yields the documents of read(), or only those after `place`."""
        for number, document in islice(enumerate(self.read(), 1), place or 0, None):
            self.place = number
            yield document

    def pieces(self, place=None):
        """Yields the Pieces of all documents, or only of those after `place`."""
        for split, parts in self.documents(place):
            first, texts = True, blocks(parts)
            text = next(texts, "")
            for following in texts:
                yield Piece(split, text, first, last=False)
                first, text = False, following
            yield Piece(split, text, first, last=True)


class Texts(Corpus):
    """Texts in memory: two lists of str, one document each."""

    def __init__(self, train: list[str], val: list[str]) -> None:
        self.texts = [("train", text) for text in train] + [("val", text) for text in val]
        self.identity = sha256_of(json.dumps(self.texts))

    def read(self) -> Iterator[tuple[str, list[str]]]:
        return ((split, [text]) for split, text in self.texts)


def blocks(parts):
    """Joins the parts of a text and cuts it into blocks of about BLOCK characters, which encode to the same ids.

    Text without a safe place to cut, such as a line without spaces, is cut after LONGEST_BLOCK characters; there the
    ids may differ from those of the whole text.
    """
    text = ""
    for part in parts:
        text += part
        while (cut := SAFE_CUT.search(text, BLOCK, LONGEST_BLOCK)) or len(text) >= LONGEST_BLOCK:
            end = cut.start() if cut else LONGEST_BLOCK
            yield text[:end]
            text = text[end:]
    if text:
        yield text


def sha256_of(text):
    return hashlib.sha256(text.encode()).hexdigest()


def split_of(text, val_fraction):
    """Returns a document's split: val if its SHA-256, as a fraction of 2^256, is below val_fraction."""
    return "val" if int(sha256_of(text), 16) < val_fraction * 2**256 else "train"


def lowest(digests, val_fraction):
    """Returns the set of indices of the lowest val_fraction of the digests: at least one, but not all.

    Raises BadInput for fewer than two digests.
    """
    if len(digests) < 2:
        size = "a single document" if digests else "empty"
        raise BadInput(f"the text is {size}, but train and val need a document each; give more text")
    n_val = min(max(1, round(len(digests) * val_fraction)), len(digests) - 1)
    return set(sorted(range(len(digests)), key=digests.__getitem__)[:n_val])


def split_documents(
    documents: list[str], val_fraction: float, keys: list[str] | None = None
) -> tuple[list[str], list[str]]:
    """Splits documents into (train, val), each in the given order; val gets those whose keys hash lowest.

    documents: list of str. val_fraction: the fraction of documents that val gets, at least one document.
    keys: list of str, one for each (default: the documents). Equal keys land on the same side, except at the edge.
    """
    val = lowest([sha256_of(key) for key in keys or documents], val_fraction)
    train = [document for number, document in enumerate(documents) if number not in val]
    return train, [document for number, document in enumerate(documents) if number in val]
