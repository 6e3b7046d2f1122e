"""Trains in a process that is killed right before a call of a function, which is also right after the previous call.

A kill before write_tensors leaves half of the file written.
"""

import io
import itertools
import os
import signal

import torch

import train
from nanoladder import checkpoint
from nanoladder.run import metrics

FUNCTIONS = {"step": (train, "train_step"), "write_tensors": (checkpoint.format, "write_tensors")}
FUNCTIONS |= {name: (os, name) for name in ("fsync", "mkdir", "replace", "link", "unlink")}


def anywhere():
    """True for a call that counts."""
    return True


def kill_before(name, number, counts=anywhere):
    place, attribute = FUNCTIONS[name]
    original, calls = getattr(place, attribute), itertools.count(1)

    def call(*arguments, **options):
        if counts() and next(calls) == number:
            if name == "write_tensors":
                (file,) = arguments
                original(content := io.BytesIO(), **options)
                file.write(content.getvalue()[: content.tell() // 2])
                file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(place, attribute, call)


def run(words, name, number):
    """Trains with the words of a command line; killed right before the number-th call of the function (0: never)."""
    metrics.plot = lambda *_: None
    torch.set_num_threads(1)  # as in the tests' own process
    kill_before(name, number)
    train.main(words)
