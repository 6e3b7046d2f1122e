"""Starts processes: several that run tests/parallel/worker.py, or one that holds a lock."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

from conftest import ROOT, tiny

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # as torchrun sets it, with a warning


HOLD = "import sys; from nanoladder import files; lock = files.hold(sys.argv[1]); print('held', flush=True); input()"


@contextmanager
def holding(path):
    """Another process holds the lock of a file."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, path], cwd=ROOT, text=True, **pipes) as process:
        assert process.stdout.readline() == "held\n"
        yield
        process.communicate("\n")


def configuration(dense, documents, out_dir, data="dense", **keys):
    """A tiny config that several processes can train, on one of the two datasets."""
    dataset = {"dense": dense, "documents": documents}[data]
    return tiny(dataset=str(dataset), out_dir=str(out_dir), **{"ddp": True, "max_steps": 6, **keys})


def words(config):
    return [f"--{key}={value}" for key, value in vars(config).items()]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def torchrun(*command, n=2, options=("--standalone",)):
    """Starts n processes; returns what they left: returncode, stdout, stderr."""
    command = [*TORCHRUN, *options, f"--nproc_per_node={n}", *map(str, command)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def work(folder, jobs, n, options=("--standalone",)):
    """Runs jobs by n processes; returns the result of torchrun and what each process saw."""
    folder.mkdir(exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    result = torchrun("tests/parallel/worker.py", folder / "jobs.json", n=n, options=options)
    seen = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    return result, seen
