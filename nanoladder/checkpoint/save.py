"""Saving: a copy of the state, written by a thread while training goes on."""

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tqdm import tqdm

from nanoladder import files, parallel
from nanoladder.checkpoint.folder import BEST, LAST, history, step_name
from nanoladder.checkpoint.format import FORMAT_VERSION, serialize
from nanoladder.checkpoint.generators import generator_states
from nanoladder.checkpoint.optimizer import named_state, names, to_plain


class Writer:
    """Saves a run's checkpoints, each while training goes on. A context manager: leaving it waits for the last one.

    A checkpoint that cannot be written, to a full disk say, is warned of, and the next save tries again. If the last or
    the best one is still missing at the end, the program exits with 1.
    """

    def __init__(self, config):
        self.config = config
        self.folder = Path(config.out_dir)
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.pending = None  # the checkpoint that is being written
        self.missing = {}  # {name: the step that should be there}

    def save(self, model, optimizer, scaler, progress, best):
        """Copies the state and leaves it to be written, also as the best one if `best`. Every process has to call it.

        Waits until the previous one is written: there is never more than one copy.
        """
        self.wait()
        state = snapshot(self.config, model, optimizer, scaler, progress)
        if parallel.rank() == 0:
            self.pending = self.thread.submit(self.write, state, best)

    def wait(self):
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def write(self, state, best):
        step, last = state["progress"]["step"], self.folder / LAST
        self.missing |= dict.fromkeys([LAST, BEST] if best else [LAST], step)
        try:
            write_file(last, state)
            del self.missing[LAST]
            files.link(last, self.folder / step_name(step))
            if best:
                files.link(last, self.folder / BEST)
                del self.missing[BEST]
            for path in list(history(self.folder).values())[self.config.keep_checkpoints :]:
                path.unlink()
        except OSError as error:
            tqdm.write(f"warning: the checkpoint of step {step} is not saved: {error}", file=sys.stderr)

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        self.thread.shutdown()
        self.wait()
        if self.missing:
            missing = " and ".join(f"{name} of step {step}" for name, step in self.missing.items())
            line = f"error: {self.folder} lacks {missing}, which could not be written"
            if failure is None:
                sys.exit(line)
            print(line, file=sys.stderr)


def snapshot(config, model, optimizer, scaler, progress):
    """All that continuing needs, on the CPU and in memory of its own. Every process has to call it."""
    weights = {name: weight for weight, name in names(model).items()}
    return {
        "format_version": FORMAT_VERSION,
        "config": dataclasses.asdict(config),
        "model": parallel.gather_state(weights),
        "optimizer": parallel.gather_state(to_plain(named_state(model, optimizer))),
        "scaler": scaler.state_dict(),  # empty if it is disabled
        "generators": generator_states(),
        "progress": {**progress, "interval_loss": float(progress["interval_loss"])},  # it may be on the device
    }


def write_file(path, state):
    """Writes a snapshot. The file at path is at every instant the old one or the new one, whole. Raises OSError."""
    files.write(path, partial(serialize, state))
