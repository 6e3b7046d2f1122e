"""The checkpoints in a run's folder: their names, their order, and their removal."""

import os

from nanoladder import files

LAST, BEST = "last.safetensors", "best.safetensors"


def step_name(step):
    return f"step_{step:08}.safetensors"


def found(folder):
    """A run's checkpoints in the order in which resuming tries them; if there are none, those of an older version."""
    return current(folder) or outdated(folder)


def current(folder):
    return existing([folder / LAST, *history(folder).values(), folder / BEST])


def outdated(folder):
    """Checkpoints of format 1, by the names that they had. Loading refuses them."""
    return existing([folder / "last.pt", *sorted(folder.glob("step_*.pt")), folder / "best.pt"])


def existing(paths):
    return [path for path in paths if os.path.lexists(path)]


def history(folder):
    """The most recent checkpoints, {step: path}, the newest first."""
    paths = {path.stem.removeprefix("step_"): path for path in folder.glob("step_*.safetensors")}
    return {int(step): paths[step] for step in sorted(filter(str.isdecimal, paths), key=int, reverse=True)}


def clear(folder, step):
    """Removes what a run that begins after `step` replaces (at 0, everything) and what killed processes left half."""
    files.remove_temporaries(folder)
    later = [path for number, path in history(folder).items() if number > step]
    for path in later if step else current(folder) + outdated(folder):
        path.unlink()
