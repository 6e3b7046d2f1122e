"""A corpus: documents in a fixed order, each in train or val, that pass through bounded memory as pieces of text.

Which documents are val depends on their contents alone, on neither their order nor the number of threads: those whose
SHA-256 is lowest. Of a corpus of up to 64 MB of text that is the exact fraction of their number; of a larger one, it is
every document whose SHA-256, as a fraction of 2^256, is below val_fraction.
"""

import hashlib
import json
import re
from itertools import islice
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

    A subclass has read(), which yields (split, iterable of the parts of a document's text), and
    identity: a JSON value that tells the corpus, and its split, from any other.
    validation: a sentence for meta.json that says which part is val. n_bytes: of the text, None if unknown.
    place: the place after the document that was yielded last, a JSON value.
    """

    identity = validation = place = n_bytes = None

    def documents(self, place=None):
        """Yields what read() does, from a place on."""
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
        self.n_bytes = sum(len(text.encode()) for _, text in self.texts)
        self.identity = sha256_of(json.dumps(self.texts))

    def read(self):
        return ((split, [text]) for split, text in self.texts)


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


def sha256_of(text):
    return hashlib.sha256(text.encode()).hexdigest()


def find_threshold(documents, val_fraction, head=HEAD):
    """Finds the least [digest, number] of a document that is not val; all below are, and they are at least one.

    documents: iterable of (SHA-256 in hex, bytes of text that finding it out takes), read no further than `head` bytes.
    Raises BadInput for less than two documents.
    """
    found, n_bytes = [], 0
    for number, (digest, size) in enumerate(documents):
        found.append([digest, number])
        n_bytes += size
        if n_bytes > head and number:
            return max([f"{int(val_fraction * 2**256):064x}", 0], sorted(found)[1])
    require_text(found)
    if len(found) < 2:
        raise BadInput("the text is a single document, but train and val need one each; give more text")
    n_val = min(max(1, round(len(found) * val_fraction)), len(found) - 1)
    return sorted(found)[n_val]


def split_of(digest, number, threshold):
    return "val" if [digest, number] < threshold else "train"


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
    splits = {"train": [], "val": []}
    for number, (digest, document) in enumerate(zip(digests, documents, strict=True)):
        splits[split_of(digest, number, threshold)].append(document)
    return splits["train"], splits["val"]


def require_text(found):
    if not found:
        raise BadInput("the text is empty; expected some to learn from")


def split_text(text, val_fraction):
    """Splits a text into ([train], [val]); val is the last val_fraction of its characters."""
    require_text(text)
    cut = int(len(text) * (1 - val_fraction))
    return [text[:cut]], [text[cut:]]
