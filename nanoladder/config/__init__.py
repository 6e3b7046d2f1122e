"""Configuration: the keys, config files and the command line.

Config files are Python, and set keys. They apply from left to right, then the stages up to `--stage` and the rungs up
to `--recipe`, then `--key=value`.

- keys: the dataclass Config, each key with its type, default and meaning
- load: the command line, config files, `--help`
- check: validation of names, types, ranges and combinations, with one-line errors
- stages: the stages and rungs: names, files, order

Not here: the presets and stages themselves (config/), keys that a run inherits from its start (nanoladder/run), and
checks that need a dataset, a device or a checkpoint.
"""

from nanoladder.config.check import check, gathers_keys, of_earlier, typed
from nanoladder.config.keys import DEFAULTS, HEADINGS, TYPES, Config, differences
from nanoladder.config.load import COMMANDS, USAGE, apply, help_text, parse_arguments, read_file
from nanoladder.config.stages import STAGES_DIR, ladder_files, stage_files, stage_names, stage_path
