"""Encodes texts in a process of its own, which encode.py starts: python -P encode_worker.py

Reads pickles from stdin: the arguments of a tiktoken.Encoding and a dtype, then list after list of texts, each of which
it answers on stdout. Ends with its stdin, so with the process at the other end, however that one ends. Imports nothing
of ours: without PyTorch it starts in a tenth of a second and takes a tenth of the memory.
"""

import contextlib
import os
import pickle
import signal
import sys

import tiktoken


def encode_texts(encoding, dtype, texts):
    """Returns (the bytes of its ids, in the dtype; number of its UTF-8 bytes) for each text."""
    ids = (encoding.encode_to_numpy(text, disallowed_special=()).astype(dtype).tobytes() for text in texts)
    return [(part, len(text.encode(errors="replace"))) for part, text in zip(ids, texts, strict=True)]


def serve(requests, replies):
    """Answers requests until the other end is gone. Raises EOFError, UnpicklingError or OSError then."""
    arguments, dtype = pickle.load(requests)
    encoding = tiktoken.Encoding(**arguments)
    while True:
        pickle.dump(encode_texts(encoding, dtype, pickle.load(requests)), replies)
        replies.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Windows Ctrl-C reaches every process of a console
    with contextlib.suppress(EOFError, pickle.UnpicklingError, OSError):
        serve(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)  # no flush of half a reply that nobody reads
