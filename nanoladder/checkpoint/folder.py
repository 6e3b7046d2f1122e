"""Checkpoints in a run's folder: names, order and removal."""

import contextlib
import json
import os
import shutil
from itertools import count
from pathlib import Path

from nanoladder import files
from nanoladder.checkpoint.format import Damaged, read_tensors, reading
from nanoladder.errors import BadInput

LAST, BEST = "last.safetensors", "best.safetensors"
RECENT = 2  # checkpoints that are kept besides these


def best_or_last(folder: Path, name: str) -> Path:
    """Returns the path of a run's best or last checkpoint; of a run that never evaluated, the last.

    Raises BadInput if there is no such folder. The file itself may be missing; loading it says so.
    """
    folder = Path(folder)
    if folder.is_file():
        raise BadInput(f"out_dir={folder}: a file; expected its folder, --out_dir={folder.parent}")
    if not folder.is_dir():
        raise BadInput(f"out_dir={folder}: no such folder; expected a run's folder, such as out/quickstart")
    return folder / (BEST if name == "best" and (folder / BEST).exists() else LAST)


def list_checkpoints(folder: Path) -> list[Path]:
    """Lists a run's checkpoints in the order in which resuming tries them."""
    paths = [folder / LAST, *history(folder).values(), folder / BEST]
    return [path for path in paths if os.path.lexists(path)]


def history(folder):
    """Returns {step: path} of the most recent checkpoints, newest first."""
    paths = {path.stem.removeprefix("step_"): path for path in folder.glob("step_*.safetensors")}
    return {int(step): paths[step] for step in sorted(filter(str.isdecimal, paths), key=int, reverse=True)}


def other_names(folder, progress):
    """Lists the paths at which a checkpoint of this progress is found, besides last.safetensors."""
    step = progress["step"]
    return [folder / f"step_{step:08}.safetensors", *[folder / BEST] * (progress["best_step"] == step)]


def prune(folder):
    """Removes all but the most recent checkpoints, besides the last and the best. Raises OSError."""
    for path in list(history(folder).values())[RECENT:]:
        path.unlink()


def remove_unused_slices(folder):
    """Removes slices of no checkpoint in the folder. Raises OSError."""
    if slices := [*folder.glob("step_*.slices*")]:
        with contextlib.suppress(BadInput):  # a checkpoint cannot be read now
            used = {slices_of(path) for path in folder.glob("*.safetensors")}
            for path in slices:
                if path.name not in used:
                    shutil.rmtree(path)


def slices_of(path):
    """Returns the name of the folder with a checkpoint's slices; "" if it is in one file or damaged.

    Raises BadInput if it cannot be read.
    """
    with contextlib.suppress(Damaged), reading(path):
        return json.loads(read_tensors(path)[1].get("slices", "{}")).get("folder", "")
    return ""


def new_slices(folder: Path, step: int) -> Path:
    """Returns the path of a folder, which does not exist yet, for the slices of a checkpoint of this step."""
    names = (f"step_{step:08}.slices{number or ''}" for number in count())
    return next(path for name in names if not os.path.lexists(path := folder / name))


def former_best(step: int) -> str:
    """Returns the name of the best checkpoint, of this step, by a validation that the run has replaced."""
    return f"best_{step:08}.safetensors"


def restore(folder: Path, path: Path | None, progress: dict, former: int = 0) -> None:
    """Restores the folder to its state when the checkpoint at `path` was written. Raises OSError.

    Removes later checkpoints and the files of killed processes; gives the checkpoint the names that it lacks after a
    kill or a full disk. path: None for a new run. former: the step of a best checkpoint by another validation, else 0.
    """
    files.remove_temporaries(folder)
    for number, later in history(folder).items():
        if number > progress["step"]:
            later.unlink()
    prune(folder)
    if former and (folder / BEST).exists() and not (folder / former_best(former)).exists():
        os.replace(folder / BEST, folder / former_best(former))
    if path:
        for name in other_names(folder, progress):
            if not (name.exists() and name.samefile(path)):
                files.link(path, name)
        if not os.path.lexists(folder / LAST):
            files.link(path, folder / LAST)
    remove_unused_slices(folder)
