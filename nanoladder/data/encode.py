"""Encodes a corpus on all cores, in its order, with a bounded number of pieces in memory.

Each core has a process, and here a thread that waits for its replies. Threads alone would do, as tiktoken lets go of
Python's lock, but in one process they take a third more processor time for each byte. A process is a plain subprocess:
multiprocessing would import the main script in each, and PyTorch with it.
"""

import os
import pickle
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from nanoladder.data import encode_worker
from nanoladder.data.corpus import BLOCK, Piece
from nanoladder.data.encode_worker import encode_texts
from nanoladder.data.tokenizer import check_characters
from nanoladder.errors import BadInput

SMALL = 4  # chunks that are encoded here, in less time than processes need to start
MOST_WORKERS = 16  # reading and writing, on one core, keep up with no more


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


def encoded(corpus, position, encoding, dtype, workers=None):
    """Yields what encode_chunk returns for each chunk, in order.

    workers: number of processes (default: one a core). With one, or a corpus of at most SMALL chunks, there are none.
    Raises BadInput: a character that a char tokenizer does not know, a process that died.
    """
    workers = workers or min(n_cores(), MOST_WORKERS)
    items = chunks(corpus, position)
    first = list(islice(items, SMALL + 1))
    items = chain(first, items)
    if workers == 1 or len(first) <= SMALL:
        yield from map(partial(encode_chunk, partial(encode_texts, encoding, dtype), encoding, dtype), items)
    else:
        with processes(encoding, dtype, workers) as encode:
            yield from in_parallel(partial(encode_chunk, encode, encoding, dtype), items, workers)


def encode_chunk(encode, encoding, dtype, chunk):
    """Returns the chunk and, for each piece, its ids, an array (n,) of the dtype, and its UTF-8 bytes.

    encode: encode_texts, given all but the texts.
    """
    texts = [piece.text for piece in chunk.pieces]
    for text in texts:
        check_characters(encoding, text)
    return chunk, [(np.frombuffer(ids, dtype), n_bytes) for ids, n_bytes in encode(texts)]


@contextmanager
def processes(encoding, dtype, n):
    """Yields encode_texts, given all but the texts, to be called in n threads: it runs in n processes."""
    arguments = {
        "name": encoding.name,
        "pat_str": encoding._pat_str,
        "mergeable_ranks": encoding._mergeable_ranks,
        "special_tokens": encoding._special_tokens,
    }
    greeting, idle = pickle.dumps((arguments, dtype)), SimpleQueue()

    def encode(texts):
        worker = idle.get()
        try:
            return worker.encode(texts)
        finally:
            idle.put(worker)

    with ExitStack() as stack:
        for _ in range(n):
            idle.put(stack.enter_context(Worker(greeting)))
        yield encode


class Worker:
    """A process that encodes, see encode_worker.py. A context manager; leaving it ends the process.

    greeting: bytes that the process is sent before the first texts.
    """

    def __init__(self, greeting):
        self.greeting = greeting
        command = [sys.executable, "-P", encode_worker.__file__]  # -P: ours named as a library must not be found first
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches this process alone
            )
        except OSError as error:
            raise BadInput(f"cannot start a process that encodes: {error.strerror}; end other programs first") from None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()  # closes the pipes

    def encode(self, texts):
        """Returns what encode_texts() does. Raises BadInput if the process has died."""
        greeting, self.greeting = self.greeting, b""
        try:
            self.process.stdin.write(greeting + pickle.dumps(texts))
            self.process.stdin.flush()
            return pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError, OSError):
            self.process.kill()
            raise BadInput(
                f"a process that encodes has died (exit code {self.process.wait()}), perhaps for lack of memory; give "
                "the same command again: it goes on from the last full shard"
            ) from None


def in_parallel(function, items, workers):
    """Yields function(item) for each item, in order, computed in threads, holding at most 2 · workers + 1 of them."""
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
