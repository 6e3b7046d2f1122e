"""Housekeeping of a run: its start, logging, saving, faults, signals and memory. Not here: the training itself."""

from nanoladder.run.micro_batch import OutOfMemory, halve_micro_batch
from nanoladder.run.run import Run, prepare
from nanoladder.run.start import load_config
