"""Results of the modes that measure steps, made of the runs in a folder, and the conditions of measurements."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lab.measure import runs, tables
from lab.measure.git import ROOT
from lab.measure.machine import machine_name
from nanoladder import files
from nanoladder.config import parse_arguments
from nanoladder.errors import BadInput, writing

STEPS = "steps"  # the kind of these runs
# Code on which a figure may depend: after a change, results count as those of other code.
MEASURED_CODE = (
    "train.py",
    "model.py",
    "operators/*.py",
    "nanoladder/**/*.py",
    "config/stages/*.py",
    "lab/**/*.py",
)


def read(path: Path, members: Iterable[str]) -> dict:
    """The report in a JSON file, such as recipe.json. Raises BadInput unless it is an object with these members."""
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
        if missing := [key for key in members if key not in results]:
            raise ValueError(f"it has no {missing[0]}")
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{path} is not a results file of profile.py ({error}); expected one, or remove it") from None
    return results


def write(folder: Path, contents: dict[str, Any]) -> None:
    """Writes texts to files of a folder, {name: text}. Raises BadInput if one cannot be written."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            files.write(folder / name, text + "\n")


def read_results(path: Path) -> dict:
    """The tables of a runs.jsonl: its conditions and modes, {} without any. Raises BadInput if the file is not one."""
    return results_of(*runs.read(path, STEPS))


def results_of(conditions, runs):
    """The runs of the modes that measure steps, as {**conditions, "modes": {mode: {"limits": [...], "rows": {...}}}}.

    A row has its words, a note if it was not measured, and for each measurement a list of figures, in order.
    """
    modes = {}
    for run in runs:
        mode, name, what = (run.row.get(key) for key in ("mode", "name", "what"))
        part = modes.setdefault(mode, {"limits": [], "rows": {}})
        row = part["rows"].setdefault(name, {}) if name else part
        if run.failed:
            row["note"] = run.failed
        elif what == "row":
            row |= run.figures
        else:
            row.setdefault(what, []).append(run.figures)
    return conditions | {"modes": modes}


def table_of(results):
    """The tables of all modes, in Markdown."""
    return "\n\n".join(tables.table(results, mode) for mode in results["modes"])


def default_folder(conditions: dict) -> Path:
    """results/<machine>/<config>, such as results/nvidia-h200/gpt2."""
    return Path("results", machine_name(conditions["machine"]), presets(conditions["config"]))


def free_folder(first: Path, report: str, kind: str, fits: Callable) -> Path:
    """The first of the folders first, first-2, first-3, ... that has no results of a kind, or runs that fit.

    report: the file that these results are written to. fits: function of the runs' conditions and the list of the runs.
    Results of other code, settings or rows stay as they are, and a line says where the new ones go.
    """
    folder, number = first, 1
    while not is_free(folder, report, kind, fits):
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    if number > 1:
        print(tables.wrapped(f"{first} has other results, of other code, settings or rows; these go to {folder}"))
    return folder


def is_free(folder, report, kind, fits):
    there, found = runs.read(folder / runs.RUNS, kind)
    return fits(there, found) if found else not (folder / report).exists()


def under(conditions: dict) -> Callable:
    """A function for free_folder: were the runs measured under these conditions?"""
    return lambda there, _: not runs.different_conditions(there, conditions)


def presets(words: list[str]) -> str:
    """The names of a command line's config files."""
    return "-".join(Path(path).stem for path in parse_arguments(words)[0]) or "defaults"


def code_hash(root: Path = ROOT, patterns: Iterable[str] = MEASURED_CODE) -> str:
    """Returns eight hexadecimal digits of a hash of the names and contents of the files matching these patterns."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]
