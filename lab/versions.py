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
    names = dict.fromkeys(("other", "this"), name_of_tree())
    copy_tree(this)
    if against:
        names["other"] = extract(against, other)
    else:
        shutil.copytree(this, other)
    if patch:
        apply(patch, this)
        names["this"] += f" + {Path(patch).name}"
    for path in paths:
        for version, source in ((this, ROOT), (other, this)):
            if not (version / path).exists():
                (version / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source / path, version / path)
    shutil.rmtree(other / "lab", ignore_errors=True)
    shutil.copytree(this / "lab", other / "lab")
    return names


def name_of_tree():
    changed = git(ROOT, "status", "--porcelain", "--", "*.py")
    return git(ROOT, "rev-parse", "--short", "HEAD").decode().strip() + " + changes" * bool(changed)


def copy_tree(folder):
    """Copies the files that git tracks as they stand, and Python files that it neither tracks nor ignores."""
    listed = git(ROOT, "ls-files", "-z") + git(ROOT, "ls-files", "-z", "--others", "--exclude-standard", "--", "*.py")
    for name in {os.fsdecode(name) for name in listed.split(b"\0") if name}:
        if (ROOT / name).is_file():  # not deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def extract(name, folder):
    """Extracts a commit to a folder. Returns its abbreviated hash. Raises BadInput if git does not know it."""
    expected = "expected a commit, branch or tag, such as HEAD~1 (a shallow clone lacks older ones)"
    unknown = f"--against={name}: no such commit; {expected}"
    sha = git(ROOT, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", failed=unknown).decode().strip()
    archive = folder.with_suffix(".zip")
    archive.write_bytes(git(ROOT, "archive", "--format=zip", sha))
    shutil.unpack_archive(archive, folder)
    if not (folder / "train.py").exists():
        raise BadInput(f"--against={name} has no train.py; {expected}")
    return git(ROOT, "rev-parse", "--short", sha).decode().strip()


def apply(patch, folder):
    """Applies a patch to a folder. Raises BadInput if it does not apply."""
    if not Path(patch).is_file():
        raise BadInput(f"--patch={patch}: no such file; expected one that `git diff` wrote")
    failed = f"--patch={patch} does not apply to the working tree; expected one that `git diff` wrote"
    git(folder, "apply", str(Path(patch).resolve()), failed=failed)


def git(folder, *words, failed=None):
    """Returns the output of a git command in a folder, in bytes. Raises BadInput with the reason if it fails."""
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}  # no checkout around it counts
    environment["GIT_OPTIONAL_LOCKS"] = "0"  # the index is not even refreshed
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, env=environment)
    except OSError as error:
        raise BadInput(f"--mode=judge needs git, which cannot be run ({error.strerror}); install it") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        failed = failed or f"{folder} is not a git checkout; --mode=judge expected one, of which it takes two versions"
        raise BadInput(f"{failed} ({reason})" if reason else failed)
    return done.stdout
