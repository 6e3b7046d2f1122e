"""Encodes a corpus in threads, in its order, with a bounded number of pieces in memory.

Threads use all cores, as tiktoken lets go of Python's lock.
"""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from nanoladder.data.corpus import BLOCK, Piece
from nanoladder.data.tokenizer import check_characters

MOST_THREADS = 16  # reading and writing, on one core, keep up with no more


class Chunk(NamedTuple):
    """Pieces that are encoded together. place: that of the corpus after them, None within a document."""

    pieces: list[Piece]
    place: object


def chunks(corpus, place=None):
    """Yields the corpus, from a place on, in chunks of about BLOCK characters."""
    pieces, size = [], 0
    for piece in corpus.pieces(place):
        pieces.append(piece)
        size += len(piece.text) + 1
        if size >= BLOCK:
            yield Chunk(pieces, corpus.place if piece.last else None)
            pieces, size = [], 0
    if pieces:
        yield Chunk(pieces, corpus.place)


def encoded(corpus, place, encoding, dtype, n_threads=None):
    """Yields what encode_chunk returns for each chunk, in order. n_threads: default one a core.

    Raises BadInput: a character that a char tokenizer does not know.
    """
    encode = partial(encode_chunk, encoding, dtype)
    yield from in_parallel(encode, chunks(corpus, place), n_threads or min(n_cores(), MOST_THREADS))


def encode_chunk(encoding, dtype, chunk):
    """Returns the chunk and, for each piece, its ids, an array (n,) of the dtype, and its number of UTF-8 bytes."""
    encodings = []
    for piece in chunk.pieces:
        check_characters(encoding, piece.text)
        ids = encoding.encode_to_numpy(piece.text, disallowed_special=()).astype(dtype)
        encodings.append((ids, len(piece.text.encode(errors="replace"))))
    return chunk, encodings


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
