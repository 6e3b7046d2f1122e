"""The stages of the first ladder and the rungs of the second: their files, order, fields and reasons.

config/stages/NN_name.py is the stage `name`. The files whose docstrings have no line `Stands on: NAME` are the trunk:
each stands on the one before it. A file with that line stands on the stage that it names, as a branch. So the next file
stands on the top of the trunk, whatever branches come before it. config/recipe/ holds the rungs in the same way. In
this file "stage" means either.
"""

import ast
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from nanoladder.errors import BadInput, nearest

PRESETS = Path(__file__).parents[2] / "config"
STAGES_DIR = PRESETS / "stages"
RECIPE_DIR = STAGES_DIR.with_name("recipe")
LADDERS = {"stage": STAGES_DIR, "recipe": RECIPE_DIR}  # by option


def files(folder: Path | None = None) -> dict[str, Path]:
    """{name: path} of all stages of a ladder, in order."""
    return files_in(folder or STAGES_DIR)


@cache
def files_in(folder):
    return {path.stem.partition("_")[2]: path for path in sorted(folder.glob("[0-9][0-9]_*.py"))}


def stage_names(folder: Path | None = None) -> list[str]:
    """Names of a ladder's stages in order, each after the stage that it stands on."""
    return list(files(folder))


def ladder_of(name: str, *folders: Path) -> Path:
    """Returns the folder, among these or all, of a stage's ladder; raises BadInput if no ladder has the stage."""
    folders = folders or (STAGES_DIR, RECIPE_DIR)
    ladders = {stage: folder for folder in folders for stage in files(folder)}
    if name not in ladders:
        key, kind = ("recipe", "rung") if folders == (RECIPE_DIR,) else ("stage", "stage")
        raise BadInput(f"{key}={name}: no such {kind}{nearest(name, ladders)}; `python ladder.py` lists them")
    return ladders[name]


def parse(name: str) -> ast.Module:
    """Parses a stage's file into a syntax tree; raises BadInput if there is no such stage."""
    return parse_file(files(ladder_of(name))[name])


@cache
def parse_file(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def paragraphs(name: str) -> list[list]:
    """Returns the docstring of a stage as [[line in its file, label, text]]: the first line, the rest, labeled parts.

    A label, such as Why, begins a line and ends in a colon; lines before the first have none.
    """
    docstring = ast.get_docstring(parse(name), clean=False) or ""
    first, *lines = docstring.splitlines() or [""]
    number = next((node.lineno for node in parse(name).body), 1)
    parts = [[number, "", first], [number + 1, "", ""]]
    for n, line in enumerate(lines, number + 1):
        if match := re.match(r"(Stands on|[A-Z]\w*):(?:\s+|$)", line):
            parts.append([n, match[1], line[match.end() :]])
        else:
            parts[-1][2] += f"\n{line}"
    return [[n, label, text.strip()] for n, label, text in parts]


def stage_below(name: str) -> str | None:
    """Name of the stage that a stage stands on; None for the first."""
    before = itertools.takewhile(lambda other: other != name, stage_names(ladder_of(name)))
    return named_below(name) or next((other for other in reversed([*before]) if not named_below(other)), None)


def named_below(name):
    """Name of the stage that a stage's docstring says it stands on; None for one of the trunk."""
    return next((text for _, label, text in paragraphs(name) if label == "Stands on"), None)


def stage_path(name: str) -> list[str]:
    """Names of the stages from the first up to `name`; raises BadInput if there is no such stage."""
    below = stage_below(name)
    return [*stage_path(below), name] if below else [name]


def stage_files(name: str, folder: Path | None = None) -> list[Path]:
    """Paths of the files of all stages of a ladder up to and including `name`; raises BadInput if there is none."""
    ladder_of(name, folder or STAGES_DIR)
    return [files(folder)[stage] for stage in stage_path(name)]


def ladder_files(tops: dict[str, str]) -> list[Path]:
    """Paths of all files up to the stages of {"stage": name, "recipe": name}; raises BadInput as stage_files does."""
    return [path for key, folder in LADDERS.items() if key in tops for path in stage_files(tops[key], folder)]


def needs_several(name: str) -> bool:
    """True for a stage that one process ignores: ddp, and the stages above it."""
    return "ddp" in stage_path(name)


def fields(name: str) -> dict[str, str]:
    """Returns the assignments of a stage's file, {field: expression}."""
    assignments = [node for node in parse(name).body if isinstance(node, ast.Assign)]
    return {node.targets[0].id: ast.unparse(node.value) for node in assignments}


def fields_up_to(name: str) -> dict[str, str]:
    """Returns {field: expression} of all fields of both ladders at a stage: its own, and the other's first."""
    firsts = [stage_names(folder)[0] for folder in (RECIPE_DIR, STAGES_DIR)]
    return {field: value for stage in [*firsts, *stage_path(name)] for field, value in fields(stage).items()}


def reason(name: str) -> str:
    """Returns the first line of a stage's docstring."""
    return paragraphs(name)[0][2]


def tree(folder: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yields (lines, name) of a ladder's stages: the branches from one, then the next of the trunk.

    lines: the branch that leads there; none on the trunk.
    """
    names = stage_names(folder)
    below = {name: stage_below(name) for name in names}
    above = {name: [other for other in names if below[other] == name] for name in names}

    def walk(name, lines, ahead):
        yield lines, name
        branches = [other for other in above[name] if named_below(other)]
        for other in branches:
            last = other == branches[-1]
            if lines and len(branches) == 1:  # the branch goes on
                yield from walk(other, ahead, ahead)
            else:
                yield from walk(other, ahead + ("└ " if last else "├ "), ahead + ("  " if last else "│ "))
        for other in above[name]:
            if other not in branches:  # the trunk goes on
                yield from walk(other, "", "")

    return walk(names[0], "", "")
