"""Checkpoints: saved whole or not at all, while training goes on; loaded exactly, or refused in one line.

A checkpoint is one safetensors file, which any tool for that format reads. Its tensors:

    <weight>                      a weight under its plain name; a tied one once, as token_embedding.weight
    optimizer.<weight>.<state>    the optimizer's state of that weight; of an 8-bit tensor its parts: <state>.codes, ...
    generators.<device>           random states, one row per process

Its metadata, each entry JSON but the last:

    format_version                2
    config                        every key
    progress                      step, best_val_loss, interval_loss, interval_steps
    scaler                        the loss scale of float16 and its history; else empty
    optimizer                     the optimizer's state that is not a tensor, {weight: {state: value}}
    sha256                        of everything else in the file, by format.digest

Tensors are whole, however many processes trained: any number of processes, sharded or not, continues from a file.
A run's folder holds last.safetensors (the newest), best.safetensors, and the most recent ones as
step_00000250.safetensors and so on: up to three names of one file.

Files: save.py writes, load.py reads, format.py is the layout above, check.py refuses what is not ours, folder.py knows
a run's files, optimizer.py and generators.py turn what they are named after into plain tensors and back. Atomic writing
is nanoladder/files.py; gathering shards is nanoladder/parallel.
"""

from nanoladder.checkpoint.check import Damaged, config_of
from nanoladder.checkpoint.folder import BEST, LAST, clear, found, history
from nanoladder.checkpoint.generators import generator_states, set_generator_states
from nanoladder.checkpoint.load import load, load_weights, newest, resume
from nanoladder.checkpoint.save import Writer, snapshot, write_file

__all__ = [
    "BEST",
    "LAST",
    "Damaged",
    "Writer",
    "clear",
    "config_of",
    "found",
    "generator_states",
    "history",
    "load",
    "load_weights",
    "newest",
    "resume",
    "set_generator_states",
    "snapshot",
    "write_file",
]
