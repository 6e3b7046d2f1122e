"""Two versions of this repository side by side in a temporary folder; the checkout and git's index are only read."""

import os
import shutil
import subprocess

from lab.results import ROOT
from nanoladder.errors import BadInput


def check_out(folder, against, paths):
    """Fills folder/this and folder/other, and returns {side: its name}. Raises BadInput.

    this: the working tree as it stands, with new Python files. other: the commit `against`, with the lab/ of this.
    paths: config files inside the checkout; other gets those that it lacks.
    """
    this, other = folder / "this", folder / "other"
    head, changed = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "--", "*.py")
    archive = folder / "other.zip"
    folder.mkdir(parents=True, exist_ok=True)
    git("archive", f"--output={archive}", against, failed=f"--against={against}: expected a commit or branch")
    shutil.unpack_archive(archive, other)
    listed = git("ls-files"), git("ls-files", "--others", "--exclude-standard", "--", "*.py")
    names = [name for name in "\n".join(listed).splitlines() if (ROOT / name).is_file()]  # not deleted
    for version, copied in ((this, names), (other, [name for name in names if name.startswith("lab/")])):
        for name in [*copied, *(path for path in paths if not (version / path).exists())]:
            (version / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, version / name)
    return {"other": against, "this": f"{head} + changes" if changed else head}


def git(*words, failed="--mode=judge takes two versions of a git checkout"):
    """The output of a git command in this repository. Raises BadInput with the reason if it fails."""
    settings = {"GIT_CEILING_DIRECTORIES": str(ROOT.parent), "GIT_OPTIONAL_LOCKS": "0"}  # no other checkout; reads
    command = ["git", "-C", str(ROOT), "-c", "core.quotePath=false", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    except OSError as error:
        raise BadInput(f"--mode=judge needs git, which cannot be run ({error.strerror}); install it") from None
    if done.returncode:
        reason = done.stderr.strip().partition("\n")[0]
        raise BadInput(f"{failed} ({reason})")
    return done.stdout.strip()
