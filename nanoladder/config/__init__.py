"""The configuration: every knob in one frozen dataclass, and how the command line fills it.

    load_config(["config/x.py", "more.py", "--stage=amp", "--learning_rate=3e-4"])

Files are plain assignments, applied left to right; then the stages up to `--stage`; then `--key=value`.
"""

from nanoladder.config.check import check, typed
from nanoladder.config.keys import DEFAULTS, MEANINGS, TYPES, Config, differences
from nanoladder.config.load import load_config, read_assignments
from nanoladder.config.stages import STAGES_DIR, stage_files, stage_names

__all__ = [
    "DEFAULTS",
    "MEANINGS",
    "STAGES_DIR",
    "TYPES",
    "Config",
    "check",
    "differences",
    "load_config",
    "read_assignments",
    "stage_files",
    "stage_names",
    "typed",
]
