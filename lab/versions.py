"""Two versions of this repository side by side in a temporary folder; the checkout and git's index are only read."""

import os
import shutil
import subprocess
from pathlib import Path

from lab.results import ROOT
from nanoladder.errors import BadInput


def check_out(folder, against, patch, paths):
    """Fills folder/this and folder/other, and returns {side: its name}. Raises BadInput.

    this: the working tree as it stands, with the patch if there is one. other: the commit `against` or, without one,
    the tree without the patch. Both get the lab/ of this. paths: config files inside the checkout; other gets those
    that it lacks.
    """
    this, other = folder / "this", folder / "other"
    head, changed = git(ROOT, "rev-parse", "--short", "HEAD"), git(ROOT, "status", "--porcelain", "--", "*.py")
    tree = f"{head} + changes" if changed else head
    names = {"other": against or tree, "this": f"{tree} + {Path(patch).name}" if patch else tree}
    copy_tree(this)
    if against:
        archive = folder / "other.zip"
        git(ROOT, "archive", f"--output={archive}", against, failed=f"--against={against}: expected a commit or branch")
        shutil.unpack_archive(archive, other)
    else:
        shutil.copytree(this, other)
    if patch:
        failed = f"--patch={patch} does not apply to the working tree; expected one that `git diff` wrote"
        git(this, "apply", str(Path(patch).resolve()), failed=failed)
    for path in paths:
        for version, source in ((this, ROOT), (other, this)):
            if not (version / path).exists():
                (version / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source / path, version / path)
    shutil.rmtree(other / "lab", ignore_errors=True)
    shutil.copytree(this / "lab", other / "lab")
    return names


def copy_tree(folder):
    """Copies the files that git tracks as they stand, and Python files that it neither tracks nor ignores."""
    listed = git(ROOT, "ls-files"), git(ROOT, "ls-files", "--others", "--exclude-standard", "--", "*.py")
    for name in "\n".join(listed).splitlines():
        if (ROOT / name).is_file():  # not deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def git(folder, *words, failed="--mode=judge takes two versions of a git checkout"):
    """The output of a git command in a folder. Raises BadInput with the reason if it fails."""
    settings = {"GIT_CEILING_DIRECTORIES": str(folder.parent), "GIT_OPTIONAL_LOCKS": "0"}  # no other checkout; reads
    command = ["git", "-C", str(folder), "-c", "core.quotePath=false", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    except OSError as error:
        raise BadInput(f"--mode=judge needs git, which cannot be run ({error.strerror}); install it") from None
    if done.returncode:
        reason = done.stderr.strip().partition("\n")[0]
        raise BadInput(f"{failed} ({reason})")
    return done.stdout.strip()
