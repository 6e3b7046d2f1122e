"""Trials: whole training runs, each by train.py in a separate process with one thread.

A finished trial is a line of trials.jsonl and is not run again. Its key is its config's non-default keys
and the data. A trial that diverged is a line that says so; one that failed for another reason is tried again.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lab.measure.cli import command_line
from lab.measure.git import commit
from lab.measure.results import ROOT, write
from nanoladder import files
from nanoladder.config import DEFAULTS, Config, differences
from nanoladder.errors import BadInput
from nanoladder.run.metrics import read_metrics

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # more only compete
OF_A_RUN = ("out_dir", "init_from", "log_interval", "sample_interval", "wandb")
DIVERGED = "stopped at step"  # in the last line of train.py
PAUSE = 0.2  # seconds between two looks at the processes


class Trial(NamedTuple):
    """A run of a row's config at a multiple of its learning rates and of its steps."""

    name: str
    config: Config
    seed: int
    factor: float = 1.0
    length: float = 1.0

    def resolved(self):
        """The config as trained: one evaluation at the end, no checkpoints."""
        config, steps = self.config, round(self.length * self.config.max_steps)
        values = {key: DEFAULTS[key] for key in OF_A_RUN}
        values |= {key: self.factor * getattr(config, key) for key in ("learning_rate", "min_lr")}
        values |= {"seed": self.seed, "max_steps": steps, "log_interval": steps, "eval_interval": steps}
        values |= {"num_workers": 0, "save_interval": 0}
        if config.lr_decay_steps:
            values["lr_decay_steps"] = round(self.length * config.lr_decay_steps)
        return dataclasses.replace(config, **values)

    def words(self):
        """Its command line."""
        return command_line(differences(self.resolved()))

    def __str__(self):
        return f"{self.name}, rate × {self.factor:g}, length {self.length:.3g}, seed {self.seed}"


class Trials:
    """The trials of a folder. A context manager, in which no other process may write there."""

    def __init__(self, folder, data, machine):
        self.path, self.data = Path(folder, "trials.jsonl"), data
        self.origin = {"machine": machine, "commit": commit()}
        self.rows, self.keys = read_metrics(self.path), {}
        self.finished = {key_of(row["config"], row["data"]): row for row in self.rows if not row["failed"]}

    def __enter__(self):
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.lock = files.hold(self.path.parent / ".lock")
        except BlockingIOError:
            raise BadInput(f"another --mode=recipe writes to {self.path.parent}; choose another --out_dir") from None
        except OSError as error:
            raise BadInput(f"{self.path.parent} cannot be written ({error}); choose another --out_dir") from None
        return self

    def __exit__(self, *_):
        self.lock.close()

    def key(self, trial):
        if trial not in self.keys:
            self.keys[trial] = key_of(differences(trial.resolved()), self.data)
        return self.keys[trial]

    def loss(self, trial):
        """The final validation loss, in nats per token; infinite if it diverged or failed, None if it has not run."""
        row = self.finished.get(self.key(trial))
        return row and (row["val_loss"] or math.inf)

    def bits_per_nat(self):
        """Bits per byte of a loss of one nat per token."""
        return next(row["val_bpb"] / row["val_loss"] for row in self.rows if row["val_loss"])

    def add(self, trial, outcome, parameters):
        """Adds a process's outcome to trials.jsonl."""
        config, key = trial.resolved(), self.key(trial)
        row = {"name": trial.name, "seed": trial.seed, "lr_factor": trial.factor, "length": trial.length}
        row |= {"steps": config.max_steps, **outcome, "parameters": parameters, **self.origin}
        self.finished[key] = row | {"config": differences(config), "data": self.data}
        self.rows.append(self.finished[key])
        write(self.path.parent, {self.path.name: "\n".join(map(json.dumps, self.rows))})

    def run(self, wanted, parameters, end, at_once):
        """Runs trials, `at_once` in parallel, until none is wanted; starts none after `end` (time.monotonic).

        wanted: function without arguments; the trials that are still to run, in order. It is called after each trial.
        parameters: function of a config.
        """
        running, todo = {}, wanted()
        with tqdm(unit="trial", initial=len(self.finished), total=len(self.finished) + len(todo)) as bar:
            try:
                while running or (todo and time.monotonic() < end):
                    for trial in todo:
                        if len(running) < at_once and time.monotonic() < end and self.key(trial) not in running:
                            running[self.key(trial)] = trial, Child(trial.words(), ONE_THREAD)
                            bar.set_postfix_str(" | ".join(str(trial) for trial, _ in running.values()))
                    over = {key: outcome for key, (_, child) in running.items() if (outcome := child.outcome())}
                    for key, outcome in over.items():
                        trial, _ = running.pop(key)
                        self.add(trial, outcome, parameters(trial.config))
                        bar.write(f"{trial}: {outcome['note'] or format(outcome['val_loss'], '.4f')}")
                        bar.update()
                    if over:
                        todo = wanted()
                        bar.total = len(self.finished) + len(todo)
                    else:
                        time.sleep(PAUSE)
            finally:
                for _, child in running.values():
                    child.end()


def key_of(config, data):
    """The key of a trial. config: its non-default keys."""
    return json.dumps([config, data], sort_keys=True)


class Child:
    """A process that trains from scratch in a temporary folder, by train.py or another script with these arguments.

    environment: additional environment variables.
    """

    def __init__(self, words, environment, script=ROOT / "train.py"):
        self.folder, self.start = tempfile.TemporaryDirectory(prefix="trial-"), time.monotonic()
        self.log = open(Path(self.folder.name, "log"), "w+")  # noqa: SIM115 end() closes it
        streams = {"stdout": self.log, "stderr": self.log, "stdin": subprocess.DEVNULL}
        command = [sys.executable, script, *words, f"--out_dir={self.folder.name}/run"]
        self.process = subprocess.Popen(command, env=os.environ | environment, **streams)

    def metrics(self):
        """The rows of metrics so far."""
        return read_metrics(Path(self.folder.name, "run", "metrics.jsonl"))

    def outcome(self):
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
        self.end()
        return outcome

    def end(self):
        self.process.kill()
        self.process.wait()
        self.log.close()
        self.folder.cleanup()
