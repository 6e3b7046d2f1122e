"""The ladder's stages: their names, files, fields and reasons, and what each stands on.

config/stages/NN_name.py is the stage `name`. It stands on the stage of the file before, unless a line of its docstring
says `Stands on: NAME`. So the ladder is a tree: a trunk, and branches from its top.
"""

import ast
import itertools
import re
from pathlib import Path

from nanoladder.errors import BadInput, nearest

STAGES_DIR = Path(__file__).parents[2] / "config" / "stages"


def files():
    """{name: path} of all stages, in order."""
    return {path.stem.partition("_")[2]: path for path in sorted(STAGES_DIR.glob("[0-9][0-9]_*.py"))}


def stage_names():
    """Names of the ladder's stages, in order: each after the one that it stands on."""
    return list(files())


def parse(name):
    """Parses a stage's file into a syntax tree; raises BadInput if there is no such stage."""
    if name not in files():
        raise BadInput(f"stage={name}: no such stage{nearest(name, stage_names())}; `python ladder.py` lists them")
    return ast.parse(files()[name].read_text(encoding="utf-8"))


def stage_below(name):
    """Name of the stage that a stage stands on; None for the first."""
    if said := re.search(r"^Stands on: (\w+)$", ast.get_docstring(parse(name)) or "", re.MULTILINE):
        return said[1]
    return dict(itertools.pairwise(reversed(stage_names()))).get(name)


def stage_path(name):
    """Names of the stages from the first up to `name`; raises BadInput if there is no such stage."""
    below = stage_below(name)
    return [*stage_path(below), name] if below else [name]


def stage_files(name):
    """Paths of the files of all stages up to and including `name`; raises BadInput if there is no such stage."""
    return [files()[stage] for stage in stage_path(name)]


def needs_several(name):
    """True for a stage that one process ignores: ddp, and what stands on it."""
    return "ddp" in stage_path(name)


def fields(name):
    """Returns the assignments of a stage's file, {field: expression}."""
    assignments = [node for node in parse(name).body if isinstance(node, ast.Assign)]
    return {node.targets[0].id: ast.unparse(node.value) for node in assignments}


def fields_up_to(name):
    """Returns {field: expression} of all fields of the ladder, as they are at a stage."""
    return {field: value for stage in stage_path(name) for field, value in fields(stage).items()}


def reason(name):
    """Returns the first line of a stage's docstring."""
    return ast.get_docstring(parse(name)).splitlines()[0]


def tree():
    """Yields (lines, name) of every stage, in order. lines: the branch that leads to it, as text; none on the trunk."""
    above = {name: [other for other in stage_names() if stage_below(other) == name] for name in stage_names()}

    def climb(name, lines, ahead):
        yield lines, name
        for other in above[name]:
            if len(above[name]) == 1:
                yield from climb(other, ahead, ahead)
            else:
                last = other == above[name][-1]
                yield from climb(other, ahead + ("└ " if last else "├ "), ahead + ("  " if last else "│ "))

    return climb(stage_names()[0], "", "")
