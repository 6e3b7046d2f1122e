"""Whole training runs, each by train.py, or a script like it, in a separate process."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab.measure.results import ROOT
from nanoladder.run.metrics import read_metrics

DIVERGED = "stopped at step"  # in the last line of train.py


class Child:
    """A process that trains from scratch in a temporary folder, by train.py or another script with these arguments.

    A context manager, which ends the process and removes the folder. environment: additional environment variables.
    """

    def __init__(self, words: list[str], environment: dict, script: Path | str = ROOT / "train.py") -> None:
        self.folder, self.start = tempfile.TemporaryDirectory(prefix="trial-"), time.monotonic()
        self.log = open(Path(self.folder.name, "log"), "w+")  # noqa: SIM115 end() closes it
        streams = {"stdout": self.log, "stderr": self.log, "stdin": subprocess.DEVNULL}
        command = [sys.executable, script, *words, f"--out_dir={self.folder.name}/run"]
        self.process = subprocess.Popen(command, env=os.environ | environment, **streams)

    def __enter__(self):
        return self

    def metrics(self) -> list[dict]:
        """The rows of metrics so far."""
        return read_metrics(Path(self.folder.name, "run", "metrics.jsonl"))

    def outcome(self) -> dict | None:
        """The final losses, or none and a note of the reason; None while the process is running."""
        if self.process.poll() is None:
            return None
        outcome = {"seconds": round(time.monotonic() - self.start, 1), "note": None, "failed": False}
        self.log.seek(0)
        lines = [line for line in self.log.read().splitlines() if line.strip()] or [""]
        last = next((line for line in lines if line.startswith("error: ")), lines[-1])
        row = (self.metrics() or [{}])[-1]
        outcome |= {key: row.get(key) for key in ("val_loss", "val_bpb", "tokens")}
        if self.process.returncode:
            outcome["failed"] = DIVERGED not in last
            outcome["note"] = f"{'failed' if outcome['failed'] else 'diverged'}: {last.removeprefix('error: ')}"
        elif not outcome["val_loss"]:
            outcome["note"] = "ended without a finite validation loss (is eval_interval=0?)"
        return outcome

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()
        self.folder.cleanup()
