"""The ladder's stages: their names, files, fields and reasons."""

import ast
from pathlib import Path

from nanoladder.errors import BadInput, nearest

STAGES_DIR = Path(__file__).parents[2] / "config" / "stages"


def stage_names():
    """Names of the ladder's stages, in order: config/stages/NN_name.py is the stage `name`."""
    return [path.stem.partition("_")[2] for path in sorted(STAGES_DIR.glob("[0-9][0-9]_*.py"))]


def stage_files(name):
    """Paths of the files of all stages up to and including `name`; raises BadInput if there is no such stage."""
    names = stage_names()
    if name not in names:
        raise BadInput(f"stage={name}: no such stage{nearest(name, names)}; `python ladder.py` lists them")
    return sorted(STAGES_DIR.glob("[0-9][0-9]_*.py"))[: names.index(name) + 1]


def parse(name):
    """Parses a stage's file into a syntax tree."""
    return ast.parse(stage_files(name)[-1].read_text(encoding="utf-8"))


def fields(name):
    """Returns the assignments of a stage's file, {field: expression}."""
    assignments = [node for node in parse(name).body if isinstance(node, ast.Assign)]
    return {node.targets[0].id: ast.unparse(node.value) for node in assignments}


def reason(name):
    """Returns the first line of a stage's docstring."""
    return ast.get_docstring(parse(name)).splitlines()[0]


def ladder_table(config):
    """Returns the ladder as a Markdown table: each stage's field with its value in naive, the stage and a config."""
    naive, *names = stage_names()
    lines = ["| stage | field | naive | the stage | this run | |", "| --- | --- | --- | --- | --- | --- |"]
    for name in names:
        for field, value in fields(name).items():
            values = fields(naive)[field], value, repr(getattr(config, field))
            lines.append(f"| {name} | {field} | {' | '.join(values)} | {reason(name)} |")
    return "\n".join(lines) + "\n"
