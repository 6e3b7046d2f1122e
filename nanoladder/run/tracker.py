"""The run on Weights & Biases, if track=wandb. Training never dies of it, nor waits: metrics.jsonl has every row."""

import contextlib
import dataclasses
import importlib
import os
import sys
from pathlib import Path

from tqdm import tqdm

from nanoladder.errors import BadInput

PROJECT = "nanoladder"  # unless WANDB_PROJECT is set
TIMEOUT = 30  # seconds for wandb's server to begin a run, and at the end to take the rest of it


class NoTracker:
    """Does nothing."""

    def log(self, row):
        pass

    def finish(self, failed):
        pass


class WandB:
    """A run on Weights & Biases, named after out_dir. After its first error it is left alone.

    WANDB_MODE=offline records it in out_dir/wandb for `wandb sync`; so does a run that cannot reach wandb, or without
    an API key, which wandb would wait for somebody to type.
    """

    def __init__(self, config):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # without a network it delays the exit by 20 s
        import wandb

        def begin(**settings):
            return wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=Path(config.out_dir).absolute().name,  # that of . too
                dir=config.out_dir,
                config=dataclasses.asdict(config),
                settings=wandb.Settings(silent=True, **settings),
            )

        self.run, online = None, os.environ.get("WANDB_MODE", "online") == "online"
        with self.surviving():
            try:
                if online and not wandb.login(prompt=False, verify=False):
                    raise ConnectionError("no API key; `wandb login` stores one")
                self.run = begin(init_timeout=TIMEOUT, finish_timeout=TIMEOUT, finish_timeout_raises=True)
            except Exception as error:
                warn(f"wandb cannot be reached, so the run is recorded offline: {error}")
                wandb.teardown()
                self.run = begin(mode="offline")
            place = f"offline; wandb sync {self.run.settings.sync_dir}" if self.run.offline else self.run.url
            tqdm.write(f"wandb: {place}")

    @contextlib.contextmanager
    def surviving(self):
        """Turns any error inside the `with` block into a warning, and ends the tracking."""
        try:
            yield
        except (Exception, SystemExit) as error:  # wandb exits when its service has died
            self.run = None
            warn(f"wandb failed, but training did not: {error}")

    def log(self, row):
        if self.run:
            with self.surviving():
                self.run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])

    def finish(self, failed):
        if self.run:
            with self.surviving():
                self.run.finish(exit_code=int(failed))


def require_tracker(config):
    """Raises BadInput if the config asks for a tracker whose package is missing."""
    if config.track != "off":
        try:
            importlib.import_module(config.track)
        except ImportError as error:
            raise BadInput(
                f"track={config.track}: {config.track} is not installed ({error}); expected --track=off, or "
                f"python -m pip install {config.track}"
            ) from None


def warn(text):
    tqdm.write(f"warning: {' '.join(text.split())}", file=sys.stderr)
