"""Encodes a corpus with threads, in order, with a bounded number of pieces in memory.

Threads can use all cores because tiktoken releases the GIL.
"""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from nanoladder.prepare.corpus import BLOCK
from nanoladder.tokenizer.encoding import check_characters, cut_runs

MOST_THREADS = 16  # reading and writing, on one core, cannot keep up with more


def encoded(corpus, place, encoding, dtype):
    """Yields (pieces, encodings, place after them) for each chunk of a corpus from a place on, in order.

    encodings: for each piece, its ids, an array (n,) of the dtype, and its number of UTF-8 bytes. The place is None
    within a document. Holds at most two chunks per thread, plus one.
    Raises BadInput for a character that a char tokenizer does not know.
    """

    def encode(pieces, following):
        return pieces, [encode_text(encoding, dtype, piece.text) for piece in pieces], following

    n_threads, pending = min(n_cores(), MOST_THREADS), deque()
    with ThreadPoolExecutor(n_threads) as pool:
        for chunk in chunks(corpus, place):
            pending.append(pool.submit(encode, *chunk))
            if len(pending) > 2 * n_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def chunks(corpus, place):
    """Yields lists of pieces of about BLOCK characters together, each with the place after it."""
    pieces, size = [], 0
    for piece in corpus.pieces(place):
        pieces.append(piece)
        size += len(piece.text) + 1
        if size >= BLOCK:
            yield pieces, corpus.place if piece.last else None
            pieces, size = [], 0
    if pieces:
        yield pieces, corpus.place


def encode_text(encoding, dtype, text):
    check_characters(encoding, text)
    parts = [encoding.encode_to_numpy(part, disallowed_special=()).astype(dtype) for part in cut_runs(text)]
    return np.concatenate(parts), len(text.encode(errors="replace"))


def n_cores():
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
