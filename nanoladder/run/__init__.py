"""Housekeeping of a run: resuming, logging, saving, faults, signals and memory. Not here: the training itself."""

from nanoladder.run.faults import finite
from nanoladder.run.run import Run

__all__ = ["Run", "finite"]
