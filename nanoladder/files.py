"""Atomic file writes, which survive a crash, a full disk or a power cut; locks; seals; safe reads of foreign files."""

import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

try:
    import fcntl
except ImportError:  # Windows: two commands that write to the same folder are not kept apart
    fcntl = None


def expand(path: str) -> str:
    """Replaces ~ at the start of a path, also after hf:, by the home folder. Shells leave it in --key=~/x."""
    prefix = "hf:" if path.startswith("hf:~") else ""
    return prefix + os.path.expanduser(path.removeprefix(prefix))


def write(path: Path | str, content: bytes | str | Callable[[BinaryIO], object]) -> None:
    """Writes a file atomically. content: bytes, text, or a function that writes to an open binary file.

    Raises OSError; the old file then remains.
    """
    if isinstance(content, str):
        content = content.encode()
    with writing(path) as file:
        content(file) if callable(content) else file.write(content)


@contextmanager
def writing(path):
    """Yields a binary file that, on success, replaces path, complete and on disk. Raises OSError, as write() does."""
    with replacing(path) as temporary, synced(temporary) as file:
        yield file


@contextmanager
def synced(path: Path | str) -> Iterator[BinaryIO]:
    """Yields a new binary file that, on success, is complete and on disk. Raises OSError."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def link(source: Path | str, path: Path | str) -> None:
    """Replaces path by a hard link to source, or by a copy if links are not supported. Raises OSError."""
    with replacing(path) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
            with open(temporary, "rb+") as file:  # Windows syncs only files open for writing
                os.fsync(file.fileno())


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yields a temporary path; on success, renames the file created there to path. A context manager."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Syncs a folder to disk, so that a rename in it survives a power cut. Windows cannot open a folder: a no-op."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hold(path: Path | str) -> IO[str]:
    """Locks a file, created if missing, until the returned file is closed or the process ends.

    Raises BlockingIOError if another process holds it, and OSError. File systems without locks are tolerated. A forked
    worker that survives the process does not hold the lock, as it would by flock.
    """
    file = open(path, "a+")  # noqa: SIM115 the caller closes it
    try:
        if fcntl:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError:
        pass
    return file


def remove_temporaries(folder: Path) -> None:
    """Removes temporary files that killed processes left in the folder."""
    for path in folder.glob(".*.[0-9]*.tmp"):
        path.unlink()


def read(path: Path, limit: int = 2**20) -> bytes:
    """Returns the bytes of a regular file. Raises OSError, or ValueError if it is larger than limit or not regular."""
    if (n_bytes := size(path)) > limit:
        raise ValueError(f"{path.name} has {n_bytes:,} bytes, more than {limit:,}")
    return path.read_bytes()


def size(path: Path | str) -> int:
    """Returns the size of a file in bytes. Raises OSError, or ValueError for a pipe or device, which could block."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{Path(path).name} is not a regular file")
    return status.st_size


def seal(entries: dict, more: bytes = b"") -> dict:
    """Returns the entries, a dict for JSON, with their SHA-256 as "sha256", which covers further bytes, too.

    Entries that were read are as they were written if seal() does not change them.
    """
    entries = {key: value for key, value in entries.items() if key != "sha256"}
    text = json.dumps(entries, sort_keys=True).encode()
    return {**entries, "sha256": hashlib.sha256(text + more).hexdigest()}
