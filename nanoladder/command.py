"""The command `nanoladder`: the scripts, from any folder, once `pip install -e .` has installed it.

nanoladder prepare python_stdlib
nanoladder train config/quickstart.py --out_dir=here
"""

import os
import subprocess
import sys
from pathlib import Path

from nanoladder.errors import nearest

ROOT = Path(__file__).parents[1]
SCRIPTS = ("train", "sample", "evaluate", "convert", "profile", "ladder")
USAGE = f"""usage: nanoladder {{{"|".join(SCRIPTS)}}} ...   as python SCRIPT.py ..., from any folder
       nanoladder prepare DATASET ...   as python data/DATASET/prepare.py ...
Config files such as config/quickstart.py are the checkout's unless there are such files here."""


def main():
    """Runs a script in place of this process, with the arguments that follow its name."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        return print(USAGE)
    if name == "prepare":
        datasets = [path.parent.name for path in sorted(ROOT.glob("data/*/prepare.py"))]
        name = words.pop(0) if words else refuse(f"prepare: expected a dataset, one of {', '.join(datasets)}")
        script = ROOT / "data" / name / "prepare.py" if name in datasets else refuse(unknown(name, datasets))
    else:
        script = ROOT / f"{name}.py" if name in SCRIPTS else refuse(unknown(name, (*SCRIPTS, "prepare")))
    command = [sys.executable, str(script), *map(located, words)]
    if os.name == "posix":
        os.execv(sys.executable, command)  # this process becomes the script, so signals reach it
    sys.exit(subprocess.run(command).returncode)


def unknown(name, names):
    return f"{name!r} is unknown{nearest(name, names)}; expected one of {', '.join(names)}"


def refuse(message):
    """Ends the process as every script ends on bad input."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def located(word):
    """Returns the path of the checkout's config file that an argument names, unless it is a file here."""
    is_preset = word.startswith("config/") and not Path(word).exists() and (ROOT / word).exists()
    return str(ROOT / word) if is_preset else word
