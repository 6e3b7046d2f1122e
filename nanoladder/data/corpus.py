"""A corpus: documents in a fixed order, each in train or val, that pass through bounded memory as pieces of text.

Which documents are val depends on their contents alone, on neither their order nor the number of threads: those whose
SHA-256 is lowest.
"""

import hashlib
import json
import re
from itertools import islice
from typing import NamedTuple

from nanoladder.errors import BadInput

BLOCK = 2**20  # characters encoded at a time
LONGEST_BLOCK = 2**22  # if no safe cut comes, the text is cut here all the same

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

    A subclass has read(), which yields (split, iterable of the parts of a document's text), and
    identity: a JSON value that tells the corpus, and its split, from any other.
    validation: a sentence for meta.json that says which part is val.
    place: the place after the document that was yielded last, a JSON value.
    """

    identity = validation = place = None

    def documents(self, place=None):
        """Yields the documents of read(), or those after a place."""
        for number, document in islice(enumerate(self.read(), 1), place or 0, None):
            self.place = number
            yield document

    def pieces(self, place=None):
        """Yields the Pieces of all documents, or of those after a place."""
        for split, parts in self.documents(place):
            first, texts = True, blocks(parts)
            text = next(texts, "")
            for following in texts:
                yield Piece(split, text, first, last=False)
                first, text = False, following
            yield Piece(split, text, first, last=True)


class Texts(Corpus):
    """Texts in memory: two lists of str, each of them a document."""

    def __init__(self, train, val):
        self.texts = [("train", text) for text in train] + [("val", text) for text in val]
        self.identity = sha256_of(json.dumps(self.texts))

    def read(self):
        return ((split, [text]) for split, text in self.texts)


def blocks(parts):
    """Joins the parts of a text and cuts it into blocks of about BLOCK characters, encoded one by one to the same ids.

    Text without a place where it is safe to cut, such as a line without spaces, is cut after LONGEST_BLOCK characters;
    the ids there may differ from those of the whole.
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
    """The split of one of many documents: val if its SHA-256, as a fraction of 2^256, is below val_fraction."""
    return "val" if int(sha256_of(text), 16) < val_fraction * 2**256 else "train"


def lowest(digests, val_fraction):
    """The numbers of the lowest val_fraction of the digests, at least one and not all: a set.

    Raises BadInput for less than two.
    """
    if len(digests) < 2:
        size = "a single document" if digests else "empty"
        raise BadInput(f"the text is {size}, but train and val need a document each; give more text")
    n_val = min(max(1, round(len(digests) * val_fraction)), len(digests) - 1)
    return set(sorted(range(len(digests)), key=digests.__getitem__)[:n_val])


def split_documents(documents, val_fraction, keys=None):
    """Splits documents into (train, val), each in the given order; val gets those whose keys hash lowest.

    documents: list of str. val_fraction: the part of their number that val gets, at least one document.
    keys: list of str, one for each (default: the documents). Equal keys land on the same side, except at the edge.
    """
    val = lowest([sha256_of(key) for key in keys or documents], val_fraction)
    train = [document for number, document in enumerate(documents) if number not in val]
    return train, [document for number, document in enumerate(documents) if number in val]
