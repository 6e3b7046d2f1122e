"""Saving: copies the state and writes it in the background or, if no process holds all of it, tensor by tensor."""

import contextlib
import dataclasses
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from nanoladder import files, machine, parallel
from nanoladder.checkpoint.folder import BEST, LAST, history
from nanoladder.checkpoint.format import FORMAT_VERSION, flatten, write_checkpoint
from nanoladder.checkpoint.state import generator_states, names, plain_state

RECENT = 2  # checkpoints that are kept, besides the best


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
        """Saves the state as last.safetensors, and as best.safetensors if `best`. Collective.

        Waits for the previous write first, so that there is never more than one copy.
        """
        self.wait()
        values, tensors = snapshot(self.config, self.tokenizer, model, optimizer, progress)
        if parallel.mesh().is_divided:
            finish = self.write_each(values, tensors, best)
        else:
            finish = partial(self.write, values, tensors.shapes, [*tensors], best)
        if parallel.rank() == 0:
            self.pending = self.thread.submit(finish)

    def wait(self):
        if self.pending:
            self.pending.result()

    def write(self, values, shapes, tensors, best):
        """Writes the checkpoint. Arguments: those of write_checkpoint."""
        step = values["progress"]["step"]
        with warning(step), self.replacing_last(step, best) as file:
            write_checkpoint(file, values, shapes, tensors)

    def write_each(self, values, tensors, best):
        """Writes each whole tensor as it is gathered, so that there is one at a time. Collective.

        Returns a function that finishes, on rank 0: it waits for the disk and renames the file.
        """
        each, unfinished, step = iter(tensors), contextlib.ExitStack(), values["progress"]["step"]
        if parallel.rank() == 0:
            with contextlib.ExitStack() as stack:
                stack.enter_context(warning(step))
                file = stack.enter_context(self.replacing_last(step, best))
                write_checkpoint(file, values, tensors.shapes, each)
                unfinished = stack.pop_all()
        for _ in each:  # all of them in other processes; on rank 0, those for which a disk had no room
            pass
        return unfinished.close

    @contextlib.contextmanager
    def replacing_last(self, step, best):
        """Yields a file that becomes last.safetensors, and takes its other names, on success. Raises OSError."""
        last = self.folder / LAST
        self.missing |= dict.fromkeys([LAST, BEST] if best else [LAST], step)
        with files.writing(last) as file:
            yield file
        del self.missing[LAST]
        files.link(last, self.folder / f"step_{step:08}.safetensors")
        if best:
            files.link(last, self.folder / BEST)
            del self.missing[BEST]
        for path in list(history(self.folder).values())[RECENT:]:
            path.unlink()

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        self.thread.shutdown()
        self.wait()
        if self.missing and failure in (None, SystemExit):
            missing = " and ".join(f"{name} of step {step}" for name, step in self.missing.items())
            sys.exit(f"error: {self.folder} lacks {missing}, which could not be written")


@contextlib.contextmanager
def warning(step):
    """Turns an OSError into a warning: training goes on, and the next save tries again."""
    try:
        yield
    except OSError as error:
        print(f"warning: the checkpoint of step {step} is not saved: {error}", file=sys.stderr)


def find_not_finite(model, optimizer):
    """Returns the name, as in a file, of a weight or optimizer state that is not finite in any process, or None.

    Collective. Reads every number once and copies none.
    """
    weights = {name: weight for weight, name in names(model).items()}
    tensors, _ = flatten({"model": weights, "optimizer": plain_state(model, optimizer)})
    own = next((name for name, tensor in tensors.items() if not is_finite(parallel.local(tensor))), None)
    return next(filter(None, parallel.gather_objects(own)), None)


def is_finite(tensor):
    """True if all numbers of a tensor are finite. Infinity and NaN show in its extremes, 25 times sooner on a CPU."""
    extremes = tensor.detach().aminmax() if tensor.is_floating_point() and tensor.numel() else ()
    return all(math.isfinite(number) for number in extremes)


def snapshot(config, tokenizer, model, optimizer, progress):
    """Returns everything that resuming needs: a dict of values, and parallel.WholeTensors. Collective.

    tokenizer: what tokenizer.identify() returns of the data's.
    """
    tensors, values = flatten(
        {
            "format_version": FORMAT_VERSION,
            "config": dataclasses.asdict(config),
            "tokenizer": tokenizer,
            "model": {name: weight for weight, name in names(model).items()},
            "optimizer": plain_state(model, optimizer),
            "scaler": machine.scaler_of(model).state_dict(),  # empty if disabled
            "generators": generator_states(next(model.parameters()).device),
            "progress": {**progress, "interval_loss": float(progress["interval_loss"])},  # may be on the device
        }
    )
    return values | {"optimizer": parallel.merge_stages(values["optimizer"])}, parallel.WholeTensors(tensors)


def gather_weights(model):
    """Copies a model's weights, {name: whole tensor}, to rank 0's CPU; other ranks get None for tensors. Collective."""
    return dict(parallel.WholeTensors({name: weight for weight, name in names(model).items()}))
