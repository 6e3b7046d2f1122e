"""Files that are written whole or not at all, whatever happens meanwhile, a crash, a full disk or a power cut; and
files from anywhere, read without harm."""

import os
import shutil
import stat
from contextlib import contextmanager
from pathlib import Path


def write(path, content):
    """Puts a file at path, where until then the old one stays. content: bytes, text, or what writes to an open file.

    Raises OSError; the old file is then still there.
    """
    if isinstance(content, str):
        content = content.encode()
    with replacing(path) as temporary, open(temporary, "wb") as file:
        content(file) if callable(content) else file.write(content)
        file.flush()
        os.fsync(file.fileno())


def link(source, path):
    """Gives a file a second name, replacing what was there; where links are not supported, makes a copy."""
    with replacing(path) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())


@contextmanager
def replacing(path):
    """A temporary name beside path; the file that is made there takes the place of the one at path."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder):
    """Makes a rename in the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporaries(folder):
    """Removes what killed processes were writing in the folder."""
    for path in folder.glob(".*.[0-9]*.tmp"):
        path.unlink()


def read(path, limit=2**20):
    """The bytes of an ordinary file, at most limit of them; else OSError or ValueError, as a pipe could block."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is no ordinary file")
    if status.st_size > limit:
        raise ValueError(f"{path.name} has {status.st_size:,} bytes, more than {limit:,}")
    return path.read_bytes()
