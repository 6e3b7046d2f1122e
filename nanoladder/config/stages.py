"""The ladder's stages: their names and files."""

from pathlib import Path

from nanoladder.config.check import nearest
from nanoladder.errors import BadInput

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
