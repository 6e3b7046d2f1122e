"""Saving: each process copies its own part of the state, and writes it in the background."""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from nanoladder import files, parallel
from nanoladder.checkpoint import slices
from nanoladder.checkpoint.folder import BEST, LAST, new_slices, other_names, prune, remove_unused_slices
from nanoladder.checkpoint.format import FORMAT_VERSION, flatten, write_checkpoint
from nanoladder.checkpoint.state import generator_states, names, plain_state
from nanoladder.config import Config

GRACE = 10  # seconds that other processes have to finish writing when a run fails


class Writer:
    """Saves a run's checkpoints in the background. A context manager, which waits for pending writes on exit.

    If a checkpoint cannot be written, for example because the disk is full, prints a warning, and the next save tries
    again. Exits with code 1 if the last or the best checkpoint is still missing at the end.

    origin: as for snapshot(). progress: at the start. On rank 0, `best` has the loss and the step of best.safetensors,
    also while that is written.
    """

    def __init__(self, config: Config, origin: dict, progress: dict) -> None:
        self.config, self.origin = config, origin
        self.folder = Path(config.out_dir)
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.pending = None  # future of what this process is writing
        self.reports = None  # parallel.Reports of the newest checkpoint of a divided model
        self.failed = None  # time of the failure that ended the run
        self.missing = {}  # {file name: step that it should hold}
        self.unlinked = None  # progress of last.safetensors if it lacks another name
        self.best = self.best_on_disk = best_of(progress)

    def beats_best(self, val_loss: float) -> bool:
        """True if a validation loss is lower than that of best.safetensors. Collective."""
        return val_loss < parallel.gather_objects(self.best["best_val_loss"])[0]

    def save(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        progress: dict,
        val_loss: float,
    ) -> None:
        """Saves the state as last.safetensors, and as best.safetensors if val_loss is the lowest. Collective.

        Waits for the previous write first, so that there is never more than one copy. val_loss: infinite if unknown.
        """
        self.wait()
        if self.reports:
            self.reports.wait_for_first()
        if self.unlinked and self.link_names(self.folder / LAST, self.unlinked):
            self.unlinked = None
        self.best = self.best_on_disk
        if val_loss < self.best["best_val_loss"]:
            self.best = {"best_val_loss": val_loss, "best_step": progress["step"]}
        values, tensors = snapshot(self.config, self.origin, model, optimizer, scaler, progress | self.best)
        if parallel.mesh().is_divided:
            write = self.divide(values, tensors)
        else:
            write = parallel.rank() == 0 and partial(self.write, values, tensors.shapes, [*tensors])
        self.pending = self.thread.submit(write) if write else None

    def wait(self):
        if self.pending:
            self.pending.result()

    def write(self, values: dict, shapes: dict, tensors: Iterable) -> None:
        """Writes the checkpoint. Arguments: as for write_checkpoint."""
        progress = values["progress"]
        with warning("the checkpoint", progress), self.replacing_last(progress) as file:
            write_checkpoint(file, values, shapes, tensors)

    # -- a divided model

    def divide(self, values, tensors):
        """Copies this process's slices. Returns a function that writes them, and on rank 0 their index. Collective.

        None for a process that has nothing to write, because another one holds the same.
        """
        step = values["progress"]["step"]
        folder, *_ = parallel.gather_objects(None if parallel.rank() else new_slices(self.folder, step))
        scalars = {name: tensor for name, tensor in tensors.parts.items() if not tensor.dim()}
        scalars, self.reports = parallel.merge_stages(to_host(scalars)), parallel.Reports()
        if (number := parallel.holder()) is None:
            return None
        write = partial(write_and_report, folder, number, to_host(tensors.own()), self.reports)
        return write if parallel.rank() else partial(self.write_index, write, folder, values, tensors, scalars)

    def write_index(self, write_own, folder, values, tensors, scalars):
        """Writes rank 0's slices and, once the slices of all processes are on disk, the checkpoint."""
        write_own()
        progress, sizes = values["progress"], parallel.sizes()
        with contextlib.ExitStack() as stack:
            stack.callback(self.reports.finish)
            stack.enter_context(warning("the checkpoint", progress))
            try:
                with self.replacing_last(progress) as file:
                    headers = headers_in(self.reports.wait(math.prod(sizes), self.gave_up))
                    slices.require(folder, headers)
                    files.sync_folder(self.folder)
                    index = slices.index_of(folder, sizes, headers, tensors)
                    write_checkpoint(file, values | {"slices": index}, scalars, sorted(scalars.items()))
            except OSError:
                with contextlib.suppress(OSError):
                    remove_unused_slices(self.folder)  # it may have got one of its names
                raise

    def gave_up(self):
        """True once other processes, which may have been killed, have had time to write in a run that failed."""
        return self.failed is not None and time.monotonic() > self.failed + GRACE

    @contextlib.contextmanager
    def replacing_last(self, progress):
        """Yields a file that, on success, takes its other names and then becomes last.safetensors. Raises OSError.

        In this order, since a run that is killed in between resumes from the last.safetensors before, and repeats all.
        """
        last, step = self.folder / LAST, progress["step"]
        self.missing |= dict.fromkeys([LAST, BEST] if progress["best_step"] == step else [LAST], step)
        try:
            with files.replacing(last) as temporary:
                with files.synced(temporary) as file:
                    yield file
                linked = self.link_names(temporary, progress)
        finally:
            self.best = self.best_on_disk
        del self.missing[LAST]
        self.unlinked = None if linked else progress
        prune(self.folder)
        remove_unused_slices(self.folder)

    def link_names(self, source, progress):
        """Gives a complete file its names besides last.safetensors. Returns True if all succeed."""
        paths, linked = other_names(self.folder, progress), []
        for path in paths:
            with warning(path.name, progress):
                files.link(source, path)
                linked.append(path)
        if self.folder / BEST in linked:
            self.best_on_disk = best_of(progress)
            self.missing.pop(BEST, None)
        return linked == paths

    def __enter__(self):
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure not in (None, SystemExit):
            self.failed = time.monotonic()
        self.thread.shutdown()
        self.wait()
        if self.missing and failure in (None, SystemExit):
            missing = " and ".join(f"{name} of step {step}" for name, step in self.missing.items())
            sys.exit(f"error: {self.folder} lacks {missing}, which could not be written")


def to_host(tensors):
    """Copies local tensors, {name: tensor}, to the CPU; from a GPU all at once, into pinned memory."""
    own = {name: parallel.local(tensor.detach()) for name, tensor in tensors.items()}
    copies = {name: torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for name, t in own.items()}
    for name, copy in copies.items():
        copy.copy_(own[name], non_blocking=True)
    if any(copy.is_pinned() for copy in copies.values()):
        torch.cuda.synchronize()
    return copies


def write_and_report(folder, number, own, reports):
    """Writes this process's slices, and reports the digest of their header, or what failed, to rank 0."""
    report = "an error of the program"
    try:
        report = f"sha256 {slices.write(folder, number, own)}"
    except OSError as error:
        report = str(error)
    finally:
        reports.send(report)


def headers_in(reports):
    """Returns the digests that all holders reported. Raises OSError if one of them failed."""
    failed = [text for text in reports or ["a process ended"] if not text.startswith("sha256 ")]
    if failed:
        raise OSError(failed[0])
    return [text.removeprefix("sha256 ") for text in reports]


@contextlib.contextmanager
def warning(what, progress):
    """Turns an OSError into a warning: training goes on, and the next save tries again."""
    try:
        yield
    except OSError as error:
        print(f"warning: {what} of step {progress['step']} is not saved: {error}", file=sys.stderr)


def best_of(progress):
    """Returns the loss and the step of the best checkpoint, the entries of a progress dict that the Writer keeps."""
    return {key: progress[key] for key in ("best_val_loss", "best_step")}


def find_not_finite(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the name, as in a file, of a weight or optimizer state that is not finite in any process, or None.

    Collective. Reads every number once and copies none.
    """
    weights = {name: weight for weight, name in names(model).items()}
    tensors, _ = flatten({"model": weights, "optimizer": plain_state(model, optimizer)})
    first = next((name for name, tensor in tensors.items() if not is_finite(parallel.local(tensor))), None)
    return next(filter(None, parallel.gather_objects(first)), None)


def is_finite(tensor):
    """True if all numbers of a tensor are finite. Infinity and NaN show in its extremes, 25 times faster on a CPU."""
    extremes = tensor.detach().aminmax() if tensor.is_floating_point() and tensor.numel() else ()
    return all(math.isfinite(number) for number in extremes)


def snapshot(
    config: Config,
    origin: dict,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    progress: dict,
) -> tuple[dict, parallel.WholeTensors]:
    """Returns everything that resuming needs: a dict of values, and parallel.WholeTensors. Collective.

    origin: {"tokenizer": its identify(), "data": the dataset's fingerprint()}.
    """
    tensors, values = flatten(
        {
            "format_version": FORMAT_VERSION,
            "config": dataclasses.asdict(config),
            **origin,
            "model": {name: weight for weight, name in names(model).items()},
            "optimizer": plain_state(model, optimizer),
            "scaler": scaler.state_dict(),  # empty if disabled
            "generators": generator_states(next(model.parameters()).device),
            "progress": {**progress, "interval_loss": float(progress["interval_loss"])},  # may be on the device
        }
    )
    return values | {"optimizer": parallel.merge_stages(values["optimizer"])}, parallel.WholeTensors(tensors)


def gather_weights(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies a model's weights, {name: whole tensor}, to rank 0's CPU; other ranks get None for tensors. Collective."""
    return dict(parallel.WholeTensors({name: weight for weight, name in names(model).items()}))
