"""results.json: what was measured, process by process, and the conditions under which it was."""

import contextlib
import hashlib
import json
import subprocess
from pathlib import Path

from lab import tables
from nanoladder import files
from nanoladder.errors import BadInput

ROOT = Path(__file__).parents[1]
FORMAT_VERSION = 2
CONDITIONS = ("machine", "config", "keys", "data", "steps", "code")
# What a figure depends on
MEASURED = (
    "*.py",
    "nanoladder/**/*.py",
    "lab/measure.py",
    "lab/anatomy.py",
    "lab/limits.py",
    "lab/predict.py",
    "config/stages/*.py",
)


def read_results(path):
    """A results.json. Raises BadInput if it is none of this version."""
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
        version = results["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is not a results.json of profile.py ({error!r}); expected one") from None
    if version == FORMAT_VERSION and (missing := [key for key in (*CONDITIONS, "modes") if key not in results]):
        raise BadInput(f"{path} is damaged: it has no {' and no '.join(missing)}; measure again")
    if version != FORMAT_VERSION:
        raise BadInput(f"{path} has format {version}; expected format {FORMAT_VERSION}: measure again")
    return results


def write_results(folder, results):
    """Writes results.json and table.md."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / "results.json", json.dumps(results, indent=1) + "\n")
    files.write(folder / "table.md", "\n\n".join(tables.table(results, mode) for mode in results["modes"]) + "\n")


def machine_name(machine):
    """A folder's name for the machine, such as intel-xeon-2-threads-bf16 or nvidia-h200."""
    cpu = f"{tables.processor(machine)} {machine['threads']} threads" + " bf16" * machine["native_bfloat16"]
    name = machine["gpu"] or cpu
    return "-".join("".join(c if c.isalnum() else " " for c in name).lower().split())


def commit():
    """The commit that is checked out, with -dirty if files differ from it; None where that is not known."""
    with contextlib.suppress(OSError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def code_hash():
    """Changes when the code that is measured changes."""
    files = [path for pattern in MEASURED for path in sorted(ROOT.glob(pattern))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]
