"""A command of a contestant, run in a fresh copy of its folder. At the end, all that it has started or written is gone.

On Linux this covers processes that the command detached: the kernel makes them children of this process.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab.measure.launch import reason_of_exit
from nanoladder.errors import BadInput

SET_CHILD_SUBREAPER = 36  # of prctl
HOMES = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class Session:
    """`python *words` in a fresh copy of a contestant's folder, with a new home and temporary folder.

    A context manager. asked: it answers on stdout what is written to its stdin. folder: the fresh copy.
    """

    def __init__(self, contestant: Path, *words: Path | str, asked: bool = False) -> None:
        self.name, self.temporary = contestant.name, tempfile.TemporaryDirectory(dir=contestant.parent)
        home, self.folder = (Path(self.temporary.name, name) for name in ("home", contestant.name))
        home.mkdir()
        shutil.copytree(contestant, self.folder, symlinks=True)
        self.log = open(Path(self.temporary.name, "log"), "w+")  # noqa: SIM115 the context closes it
        environment = os.environ | dict.fromkeys(HOMES, str(home))
        environment |= {"PYTHONPATH": str(self.folder), "PYTHONUSERBASE": site.getuserbase()}  # the true home's
        adopt(True)
        self.before, self.used, self.start = children(), cpu_seconds(), time.monotonic()
        stdin, stdout = [subprocess.PIPE] * 2 if asked else [subprocess.DEVNULL, self.log]
        own = {"cwd": self.folder, "env": environment, "stderr": self.log}
        self.process = subprocess.Popen([sys.executable, *words], stdin=stdin, stdout=stdout, **own)

    def __enter__(self):
        return self

    def ask(self, question: bytes, n_bytes: int) -> bytes:
        """Writes to the command. Returns the next n_bytes of its answer; fewer if it has ended."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin and stdout
        with contextlib.suppress(BrokenPipeError):
            stdin.write(question)
            stdin.flush()
        return stdout.read(n_bytes)

    def finish(self, what: str) -> dict[str, float]:
        """Waits for the command. Returns its seconds, and the CPU seconds of all its processes, which end with it.

        Raises BadInput if it fails. what: names it.
        """
        code, seconds = self.process.wait(), time.monotonic() - self.start
        self.end()
        if code:
            self.log.seek(0)
            why = reason_of_exit(subprocess.CompletedProcess([], code, stderr=self.log.read()))
            raise BadInput(f"{self.name}: {what} fails: {why}")
        return {"seconds": round(seconds, 1), "cpu_seconds": round(cpu_seconds() - self.used, 1)}

    def end(self):
        """Kills the command and all that it has started. Those whose parent dies become children of this process."""
        self.process.kill()
        self.process.wait()
        while strays := children() - self.before:
            for child in strays:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)

    def __exit__(self, *_):
        self.end()
        adopt(False)
        for file in filter(None, (self.log, self.process.stdin, self.process.stdout)):
            file.close()
        self.temporary.cleanup()


def adopt(on):
    """Makes this process the new parent of orphans among its descendants, or no longer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def children():
    """The process ids of this process's children."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(path.parent.name))
    return found


def cpu_seconds():
    """CPU time, in seconds, of this process's children that have ended."""
    used = os.times()
    return used.children_user + used.children_system
