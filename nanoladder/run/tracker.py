"""The run on Weights & Biases, if track=wandb. Training never dies of it: metrics.jsonl has every row."""

import contextlib
import dataclasses
import os
import sys
from pathlib import Path

from tqdm import tqdm

TIMEOUT = 30  # seconds for wandb's server to begin a run, and at the end to take the rest of it


class Tracker:
    """A run on Weights & Biases, named after out_dir, if the config says so. After an error, a warning and no more.

    WANDB_MODE=offline records the run in out_dir/wandb, for `wandb sync`.
    """

    def __init__(self, config):
        self.run = None
        if config.track == "off":
            return
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # without a network it delays the exit by 20 s
        limits = {"init_timeout": TIMEOUT, "finish_timeout": TIMEOUT, "finish_timeout_raises": True}
        with self.surviving():
            import wandb

            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "nanoladder"),
                name=Path(config.out_dir).absolute().name,  # that of . too
                dir=config.out_dir,
                config=dataclasses.asdict(config),
                settings=wandb.Settings(silent=True, **limits),
            )
            sync = f"offline; wandb sync {self.run.settings.sync_dir}"
            tqdm.write(f"wandb: {sync if self.run.offline else self.run.url}")

    @contextlib.contextmanager
    def surviving(self):
        """Turns any error inside the `with` block into a warning, and ends the tracking."""
        try:
            yield
        except (Exception, SystemExit) as error:  # wandb exits when its service has died
            self.run = None
            tqdm.write(f"warning: wandb failed, but training goes on: {' '.join(str(error).split())}", file=sys.stderr)

    def log(self, row):
        if self.run:
            with self.surviving():
                self.run.log(row, step=row["step"])

    def finish(self, failed):
        if self.run:
            with self.surviving():
                self.run.finish(int(failed))
