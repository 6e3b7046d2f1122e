"""The git repository of this code: its commit, the files of any other, and git's commands."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from nanoladder.errors import BadInput

ROOT = Path(__file__).parents[2]


def commit() -> str | None:
    """The commit that is checked out, with -dirty if files differ from it; None if git does not know."""
    with contextlib.suppress(BadInput):
        return git("describe", "--always", "--dirty", failed="no commit") or None


def unpack(commit: str, folder: Path | str, *paths: str, failed: str) -> None:
    """Fills a folder with a commit's files, or those under some paths. Raises BadInput as git does."""
    archive = f"{folder}.zip"
    git("archive", f"--output={archive}", commit, "--", *paths, failed=failed)
    shutil.unpack_archive(archive, folder)


def git(*words: str, failed: str, folder: Path | None = None) -> str:
    """The output of a git command in a folder or, without one, this repository. Raises BadInput if it fails."""
    root = folder or ROOT
    settings = {"GIT_CEILING_DIRECTORIES": str(root.parent), "GIT_OPTIONAL_LOCKS": "0"}  # no other checkout; reads
    command = ["git", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    except OSError as error:
        raise BadInput(f"{failed} (git: {error.strerror})") from None
    if done.returncode:
        reason = done.stderr.strip().partition("\n")[0]
        raise BadInput(f"{failed} ({reason})")
    return done.stdout.strip()
