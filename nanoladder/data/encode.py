"""Encodes a corpus in threads, in its order, with a bounded number of pieces in memory.

Threads use all cores, as tiktoken lets go of Python's lock.
"""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from nanoladder.data.corpus import BLOCK
from nanoladder.data.tokenizer import check_characters

MOST_THREADS = 16  # reading and writing, on one core, keep up with no more


def encoded(corpus, place, encoding, dtype, n_threads=None):
    """Yields (pieces, encodings, place after them) for each chunk of a corpus from a place on, in order.

    encodings: for each piece its ids, an array (n,) of the dtype, and its number of UTF-8 bytes. The place is None
    within a document. n_threads: default one a core.
    Raises BadInput: a character that a char tokenizer does not know.
    """

    def encode(chunk):
        pieces, following = chunk
        return pieces, [encode_text(encoding, dtype, piece.text) for piece in pieces], following

    return in_parallel(encode, chunks(corpus, place), n_threads or min(n_cores(), MOST_THREADS))


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
    ids = encoding.encode_to_numpy(text, disallowed_special=()).astype(dtype)
    return ids, len(text.encode(errors="replace"))


def in_parallel(function, items, n_threads):
    """Yields function(item) for each item, in order, computed in threads, holding at most 2 · n_threads + 1 of them."""
    pending = deque()
    with ThreadPoolExecutor(n_threads) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > 2 * n_threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def n_cores():
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
