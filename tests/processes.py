"""Starts processes: a program in a cheap fork, or several that run a script together."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import child
from conftest import ROOT, tiny

from lab.measure import launch

PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
ENVIRONMENT = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}  # which torchrun would set too, with a warning
launch.PRELOADED += ["pytest", "hypothesis"]  # imported by conftest.py: saves half a second per child process


def forked(command, cwd=ROOT, env=os.environ, **_):
    """Replaces subprocess.run([python, *words], ...) by a fork, for code under test that starts Python."""
    return python(*command[1:], cwd=cwd, env=env)


def python(*words, cwd=ROOT, env=os.environ, stdin=""):
    """Runs `python *words` in a fork of a process that has imported torch: 0.1 s, not 3.

    Not for tests of Python's startup: of the environment variables that Python and torch read once, only
    OMP_NUM_THREADS has an effect. Returns the returncode, stdout and stderr.
    """
    words = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        for stream in streams:
            stream.write_text(stdin if stream.name == "stdin" else "")
        given = words, cwd, {**env}, streams
        process = launch.context().Process(target=child.become, args=given)
        process.start()
        process.join(300)
        process.kill()  # if it hangs
        process.join()
        return subprocess.CompletedProcess(words, process.exitcode, *(stream.read_text() for stream in streams[1:]))


def configuration(dense, documents, out_dir, data="dense", **keys):
    """A tiny config that several processes can train, on one of the two datasets."""
    dataset = {"dense": dense, "documents": documents}[data]
    return tiny(dataset=str(dataset), out_dir=str(out_dir), **{"ddp": True, "max_steps": 6, **keys})


def script(path, *words, n, folder):
    """Runs a script of the repository by n forked processes; returns their returncode, stdout and stderr."""
    folder.mkdir(exist_ok=True)
    code = 0
    try:
        launch.run_together(child.run_script, str(ROOT / path), *map(str, words), n=n, folder=folder, seconds=300)
    except RuntimeError as error:
        if not str(error).startswith("exit code "):
            raise
        code = int(str(error).removeprefix("exit code "))
    return subprocess.CompletedProcess(path, code, *((folder / name).read_text() for name in launch.OUTPUTS))


def work(folder, jobs, n, start=script, **options):
    """Runs jobs in n processes of tests/parallel/worker.py; returns the completed process and each rank's results."""
    folder.mkdir(exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    result = start("tests/parallel/worker.py", folder / "jobs.json", n=n, folder=folder, **options)
    return result, [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def torchrun(*command, n=2, folder=None, options=()):
    """Runs a command under torchrun itself, in a fork; each process that it starts imports torch anew."""
    launcher = ["-m", "torch.distributed.run", "--standalone", *options, f"--nproc_per_node={n}"]
    return python(*launcher, *command, env=ENVIRONMENT)
