"""Result files: all measurements, process by process, and their conditions.

results.json has functions of its own; the other modes' files share read(), resume() and write().
"""

import contextlib
import hashlib
import json
import subprocess
from pathlib import Path

from lab.measure import tables
from nanoladder import files
from nanoladder.config import parse_arguments
from nanoladder.errors import BadInput

ROOT = Path(__file__).parents[2]
FORMAT_VERSION = 2
CONDITIONS = ("machine", "config", "keys", "data", "steps", "code")
# Code on which a figure may depend: after a change, results count as those of other code.
MEASURED_CODE = (
    "train.py",
    "model.py",
    "operators/*.py",
    "nanoladder/**/*.py",
    "config/stages/*.py",
    "lab/**/*.py",
)


def read(path, members):
    """The results in a file. Raises BadInput unless it is an object with these members."""
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
        if missing := [key for key in members if key not in results]:
            raise ValueError(f"it has no {missing[0]}")
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{path} is not a results file of profile.py ({error}); expected one, or remove it") from None
    return results


def resume(path, conditions, new):
    """Returns the results in a file, to be continued; without a file, the conditions with the members of `new`.

    Raises BadInput as read() does, and if the results were measured under other conditions.
    """
    if not path.exists():
        return {**conditions, "commit": commit(), **new}
    results = read(path, new)
    if different := " and ".join(key for key in conditions if key not in results or results[key] != conditions[key]):
        raise BadInput(f"{path} was measured under another {different}; choose another --out_dir, or remove it")
    return results


def write(folder, contents):
    """Writes files to a folder: {name: text, or results}. Raises BadInput if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=1)
            files.write(folder / name, text + "\n")
    except OSError as error:
        raise BadInput(f"{folder} cannot be written ({error}); choose another --out_dir") from None


def read_results(path):
    """The contents of a results.json. Raises BadInput if the file is not one, or has another format."""
    results = read(path, ("format_version", "modes", *CONDITIONS))
    if (version := results["format_version"]) != FORMAT_VERSION:
        raise BadInput(f"{path} has format {version}; expected format {FORMAT_VERSION}: measure again")
    return results


def write_results(folder, results):
    """Writes results.json and table.md. Raises BadInput if they cannot be written."""
    text = "\n\n".join(tables.table(results, mode) for mode in results["modes"])
    write(folder, {"results.json": results, "table.md": text})


def open_results(folder, conditions, mode, rows, reasons):
    """Opens the results in a folder, or begins new ones, adds the rows {name: words} of a mode, and writes them.

    reasons: {row: why it is not measured}. Raises BadInput for results of other conditions or rows, and if they cannot
    be written.
    """
    results = resume(folder / "results.json", {"format_version": FORMAT_VERSION, **conditions}, {"modes": {}})
    part = results["modes"].setdefault(mode, {"limits": [], "rows": {}})
    part.pop("note", None)
    if part["rows"] and {name: row["words"] for name, row in part["rows"].items()} != rows:
        raise BadInput(f"{folder} holds other rows of {mode}; choose another --out_dir, or remove it")
    for name, words in rows.items():
        part["rows"].setdefault(name, {"words": words})["note"] = reasons.get(name)  # rows that failed are tried again
    write_results(folder, results)
    return results


def machine_name(machine):
    """A folder's name for a machine, such as intel-xeon-2-threads-amx or nvidia-h200."""
    units = " amx" if machine.get("amx") else " bf16" * machine["native_bfloat16"]
    cpu = f"{tables.processor(machine)} {machine['threads']} threads{units}"
    name = machine["gpu"] or cpu
    return "-".join("".join(c if c.isalnum() else " " for c in name).lower().split())


def default_folder(conditions):
    """results/<machine>/<config>, such as results/nvidia-h200/gpt2."""
    return Path("results", machine_name(conditions["machine"]), presets(conditions["config"]))


def presets(words):
    """The names of a command line's config files."""
    return "-".join(Path(path).stem for path in parse_arguments(words)[0]) or "defaults"


def commit():
    """The commit that is checked out, with -dirty if files differ from it; None if git does not know."""
    with contextlib.suppress(OSError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def code_hash(root=ROOT, patterns=MEASURED_CODE):
    """Returns eight hexadecimal digits of a hash of the names and contents of the files matching these patterns."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]
