"""Checkpoints in a run's folder: names, order and removal."""

import os
from pathlib import Path

from nanoladder import files
from nanoladder.errors import BadInput

LAST, BEST = "last.safetensors", "best.safetensors"


def best_or_last(folder, name):
    """Returns the path of a run's best or last checkpoint; of a run that never evaluated, the last.

    Raises BadInput if there is no such folder. The file itself may be missing; loading it says so.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise BadInput(f"out_dir={folder}: no such folder; expected a run's folder, such as out/quickstart")
    return folder / (BEST if name == "best" and (folder / BEST).exists() else LAST)


def found(folder):
    """Lists a run's checkpoints in the order in which resuming tries them."""
    paths = [folder / LAST, *history(folder).values(), folder / BEST]
    return [path for path in paths if os.path.lexists(path)]


def history(folder):
    """Returns {step: path} of the most recent checkpoints, newest first."""
    paths = {path.stem.removeprefix("step_"): path for path in folder.glob("step_*.safetensors")}
    return {int(step): paths[step] for step in sorted(filter(str.isdecimal, paths), key=int, reverse=True)}


def clear(folder, step):
    """Removes checkpoints later than `step`, and temporary files of killed processes."""
    files.remove_temporaries(folder)
    for number, path in history(folder).items():
        if number > step:
            path.unlink()
