"""Trials: whole training runs, each by train.py in a process of its own with one thread, as many at once as threads.

A finished trial is a line of trials.jsonl and is not run again. Its key is all that its config changes in the defaults,
and the data. A trial that diverged is a line that says so; one that failed in another way is tried again.
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

import torch
from tqdm import tqdm

from lab.results import ROOT, commit
from nanoladder import files
from nanoladder.config import DEFAULTS, Config, differences
from nanoladder.errors import BadInput
from nanoladder.run.metrics import read_metrics

RATES = ("learning_rate", "min_lr", "embedding_lr", "head_lr")  # keys that a learning-rate factor multiplies; 0 stays
OF_A_RUN = ("out_dir", "init_from", "stage", "recipe", "log_interval", "sample_interval", "track", "num_workers")
DIVERGED = "stopped at step"  # in the last line of train.py
PAUSE = 0.2  # seconds between two looks at the processes


class Trial(NamedTuple):
    """A config of a row, and how this trial runs it: at a multiple of its learning rates and of its steps."""

    name: str
    config: Config
    seed: int
    factor: float = 1.0
    length: float = 1.0

    def resolved(self):
        """The config as trained: one evaluation at the end, no checkpoints."""
        config, steps = self.config, round(self.length * self.config.max_steps)
        values = {key: DEFAULTS[key] for key in OF_A_RUN if key in DEFAULTS}
        values |= {key: self.factor * getattr(config, key) for key in RATES if key in DEFAULTS}
        values |= {"seed": self.seed, "max_steps": steps, "log_interval": steps, "eval_interval": steps}
        values |= {"num_workers": 0, "save_interval": 0}
        if config.lr_decay_steps:
            values["lr_decay_steps"] = round(self.length * config.lr_decay_steps)
        return dataclasses.replace(config, **values)

    def __str__(self):
        return f"{self.name}, rate × {self.factor:g}, length {self.length:.3g}, seed {self.seed}"


class Trials:
    """The trials of a folder. A context manager, in which no other process may write there."""

    def __init__(self, folder, data):
        self.path, self.data, self.commit = Path(folder, "trials.jsonl"), data, commit()
        self.rows, self.failed = read_metrics(self.path), set()
        self.finished = {self.key_of(row["config"], row["data"]): row for row in self.rows if not row.get("failed")}

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

    @staticmethod
    def key_of(config, data):
        return json.dumps([config, data], sort_keys=True)

    def key(self, trial):
        return self.key_of(differences(trial.resolved()), self.data)

    def loss(self, trial):
        """The final validation loss, in nats per token, infinite if the trial diverged or failed; None until it ran."""
        if (key := self.key(trial)) in self.failed:
            return math.inf
        row = self.finished.get(key)
        return None if row is None else math.inf if row["val_loss"] is None else row["val_loss"]

    def add(self, trial, found, parameters):
        """Writes what a process found."""
        config, key = trial.resolved(), self.key(trial)
        said = {"name": trial.name, "seed": trial.seed, "lr_factor": trial.factor, "length": trial.length}
        said |= {"steps": config.max_steps, "tokens": config.max_steps * config.batch_size * config.context_length}
        row = {**said, **found, "parameters": parameters, "commit": self.commit}
        row |= {"config": differences(config), "data": self.data}
        self.rows.append(row)
        if row.get("failed"):
            self.failed.add(key)
        else:
            self.finished[key] = row
        files.write(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def run(self, wanted, parameters, minutes=math.inf):
        """Runs trials until none is wanted; starts none after so many minutes.

        wanted: function without arguments; the trials that are still to run, in order. It is called after each trial.
        parameters: function of a config.
        """
        end, running, at_once = time.monotonic() + 60 * minutes, {}, max(1, torch.get_num_threads())
        todo = wanted()
        with tqdm(unit="trial", initial=len(self.finished), total=len(self.finished) + len(todo)) as bar:
            try:
                while running or (todo and time.monotonic() < end):
                    for trial in todo:
                        if len(running) < at_once and time.monotonic() < end and self.key(trial) not in running:
                            running[self.key(trial)] = trial, Child(trial.resolved())
                            bar.set_postfix_str(" | ".join(str(trial) for trial, _ in running.values()))
                    over = {key: found for key, (_, child) in running.items() if (found := child.found())}
                    for key, found in over.items():
                        trial, _ = running.pop(key)
                        self.add(trial, found, parameters(trial.config))
                        bar.write(f"{trial}: {found['note'] or '{val_loss:.4f}'.format(**found)}")
                        bar.update()
                    if over:
                        todo = wanted()
                        bar.total = len(self.finished) + len(todo)
                    else:
                        time.sleep(PAUSE)
            finally:
                for _, child in running.values():
                    child.end()
        return not todo


class Child:
    """A process that trains a config from scratch in a temporary folder."""

    def __init__(self, config):
        self.folder, self.start = tempfile.TemporaryDirectory(prefix="trial-"), time.monotonic()
        words = [f"--{key}={value}" for key, value in differences(config).items()]
        words.append(f"--out_dir={self.folder.name}/run")
        self.log = open(Path(self.folder.name, "log"), "w+")  # noqa: SIM115 end() closes it
        one = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # more only compete
        command = [sys.executable, ROOT / "train.py", *words]
        self.process = subprocess.Popen(command, env=one, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL)

    def found(self):
        """The final losses, or none and a note of the reason; None as long as the process runs."""
        if self.process.poll() is None:
            return None
        found = {"val_loss": None, "val_bpb": None, "seconds": round(time.monotonic() - self.start, 1), "note": None}
        rows = read_metrics(Path(self.folder.name, "run", "metrics.jsonl"))
        self.log.seek(0)
        lines = [line for line in self.log.read().splitlines() if line.strip()]
        if self.process.returncode == 0 and rows:
            found |= {key: rows[-1].get(key) for key in ("val_loss", "val_bpb")}
            found["note"] = None if found["val_loss"] else "diverged: the validation loss is not finite"
        else:
            last = next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "")
            diverged = DIVERGED in last
            found["note"] = f"{'diverged' if diverged else 'failed'} (exit code {self.process.returncode}): {last}"
            found |= {} if diverged else {"failed": True}
        self.end()
        return found

    def end(self):
        self.process.kill()
        self.process.wait()
        self.log.close()
        self.folder.cleanup()
