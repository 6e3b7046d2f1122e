"""Encodes a corpus on all cores, in its order, with a bounded number of pieces in memory.

Threads do, in one process: tiktoken lets go of Python's lock while it encodes, which is nearly all the time there is.
"""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from nanoladder.data.corpus import BLOCK, Piece
from nanoladder.data.tokenizer import encode_to_array


class Chunk(NamedTuple):
    """Pieces that are encoded together. position, bytes_read: those of the corpus after them."""

    pieces: list[Piece]
    position: object
    bytes_read: int


def chunks(corpus, position):
    """Yields the corpus, from a position on, in chunks of about BLOCK characters."""
    pieces, size = [], 0
    for piece in corpus.pieces(position):
        pieces.append(piece)
        size += len(piece.text) + 1
        if size >= BLOCK:
            yield Chunk(pieces, corpus.position(), corpus.bytes_read)
            pieces, size = [], 0
    if pieces:
        yield Chunk(pieces, corpus.position(), corpus.bytes_read)


def encode_chunk(encoding, dtype, chunk):
    """Returns the chunk and, for each piece, its ids, an array (n,) of the dtype, and its UTF-8 bytes."""
    return chunk, [
        (encode_to_array(encoding, piece.text, dtype), len(piece.text.encode(errors="replace")))
        for piece in chunk.pieces
    ]


def encoded(corpus, position, encoding, dtype, workers=None):
    """Yields what encode_chunk returns for each chunk, in order. workers: number of threads (default: all cores)."""
    yield from in_parallel(partial(encode_chunk, encoding, dtype), chunks(corpus, position), workers or n_cores())


def in_parallel(function, items, workers):
    """Yields function(item) for each item, in order, holding at most 2 · workers + 1 of them."""
    pending = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def n_cores():
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
