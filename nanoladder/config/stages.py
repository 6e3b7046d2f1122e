"""The stages of both ladders: names, files, and the stage that each stands on. lab/stages.py reads their contents.

config/stages/NN_name.py is the stage `name`. It stands on the stage of the file before it, unless a line of its
docstring says `Stands on: NAME`. So the ladder is a tree: a trunk, and branches from its top. config/recipe/ holds the
rungs of the second ladder in the same way.
"""

import ast
import itertools
import re
from functools import cache
from pathlib import Path

from nanoladder.errors import BadInput, nearest

STAGES_DIR = Path(__file__).parents[2] / "config" / "stages"
RECIPE_DIR = STAGES_DIR.with_name("recipe")
LADDERS = {"stage": STAGES_DIR, "recipe": RECIPE_DIR}  # by the option that climbs them


def files(folder=None):
    """{name: path} of all stages of a ladder, in order."""
    return files_in(folder or STAGES_DIR)


@cache
def files_in(folder):
    return {path.stem.partition("_")[2]: path for path in sorted(folder.glob("[0-9][0-9]_*.py"))}


def stage_names(folder=None):
    """Names of a ladder's stages in order, each after the stage that it stands on."""
    return list(files(folder))


def ladder_of(name, *folders):
    """Returns the folder, among these or all, of a stage's ladder; raises BadInput if no ladder has the stage."""
    folders = folders or (STAGES_DIR, RECIPE_DIR)
    ladders = {stage: folder for folder in folders for stage in files(folder)}
    if name not in ladders:
        key = "recipe" if folders == (RECIPE_DIR,) else "stage"
        raise BadInput(f"{key}={name}: no such {key}{nearest(name, ladders)}; `python ladder.py` lists them")
    return ladders[name]


def parse(name):
    """Parses a stage's file into a syntax tree; raises BadInput if there is no such stage."""
    return parse_file(files(ladder_of(name))[name])


@cache
def parse_file(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def stage_below(name):
    """Name of the stage that a stage stands on; None for the first."""
    if said := re.search(r"^Stands on: (\w+)$", ast.get_docstring(parse(name)) or "", re.MULTILINE):
        return said[1]
    return dict(itertools.pairwise(reversed(stage_names(ladder_of(name))))).get(name)


def stage_path(name):
    """Names of the stages from the first up to `name`; raises BadInput if there is no such stage."""
    below = stage_below(name)
    return [*stage_path(below), name] if below else [name]


def stage_files(name, folder=None):
    """Paths of the files of all stages of a ladder up to and including `name`; raises BadInput if there is none."""
    ladder_of(name, folder or STAGES_DIR)
    return [files(folder)[stage] for stage in stage_path(name)]


def ladder_files(tops):
    """Paths of all files up to the stages of {"stage": name, "recipe": name}; raises BadInput as stage_files does."""
    return [path for key, folder in LADDERS.items() if key in tops for path in stage_files(tops[key], folder)]
