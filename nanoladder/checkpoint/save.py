"""Saving: copies the state, then writes it in a background thread."""

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nanoladder import files, machine, parallel
from nanoladder.checkpoint.folder import BEST, LAST, history
from nanoladder.checkpoint.format import FORMAT_VERSION, write_file
from nanoladder.checkpoint.state import generator_states, names, plain_state


class Writer:
    """Saves a run's checkpoints in the background. A context manager, which waits for pending writes on exit.

    If a checkpoint cannot be written, for example because the disk is full, prints a warning, and the next save tries
    again. Exits with code 1 if the last or the best checkpoint is still missing at the end.
    """

    def __init__(self, config, tokenizer):
        self.config, self.tokenizer = config, tokenizer
        self.folder = Path(config.out_dir)
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.pending = None  # future of the checkpoint being written
        self.missing = {}  # {file name: step that it should hold}

    def save(self, model, optimizer, progress, best):
        """Copies the state and starts writing it, also as best.safetensors if `best`. Collective.

        Waits for the previous write first, so that there is never more than one copy.
        """
        self.wait()
        state = snapshot(self.config, self.tokenizer, model, optimizer, progress)
        if parallel.rank() == 0:
            self.pending = self.thread.submit(self.write, state, best)

    def wait(self):
        if self.pending:
            self.pending.result()

    def write(self, state, best):
        step, last = state["progress"]["step"], self.folder / LAST
        self.missing |= dict.fromkeys([LAST, BEST] if best else [LAST], step)
        try:
            write_file(last, state)
            del self.missing[LAST]
            files.link(last, self.folder / f"step_{step:08}.safetensors")
            if best:
                files.link(last, self.folder / BEST)
                del self.missing[BEST]
            for path in list(history(self.folder).values())[self.config.keep_checkpoints :]:
                path.unlink()
        except OSError as error:
            print(f"warning: the checkpoint of step {step} is not saved: {error}", file=sys.stderr)

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        self.thread.shutdown()
        self.wait()
        if self.missing and failure in (None, SystemExit):
            missing = " and ".join(f"{name} of step {step}" for name, step in self.missing.items())
            sys.exit(f"error: {self.folder} lacks {missing}, which could not be written")


def snapshot(config, tokenizer, model, optimizer, progress):
    """Copies everything that resuming needs to the CPU. Returns a dict. Collective.

    tokenizer: what tokenizer.identify() returns of the data's.
    """
    return {
        "format_version": FORMAT_VERSION,
        "config": dataclasses.asdict(config),
        "tokenizer": tokenizer,
        "model": gather_weights(model),
        "optimizer": parallel.gather_state(plain_state(model, optimizer)),
        "scaler": machine.scaler_of(model).state_dict(),  # empty if disabled
        "generators": generator_states(next(model.parameters()).device),
        "progress": {**progress, "interval_loss": float(progress["interval_loss"])},  # may be on the device
    }


def gather_weights(model):
    """Copies a model's weights, {name: whole tensor}, to rank 0's CPU; other ranks get None for tensors. Collective."""
    return parallel.gather_state({name: weight for weight, name in names(model).items()})
