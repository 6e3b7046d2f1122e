"""Experiment trackers: wandb. A failing tracker never stops training."""

import dataclasses
import sys
from pathlib import Path

from tqdm import tqdm


class Tracker:
    """Sends metrics to wandb if config.wandb enables it; else does nothing."""

    def __init__(self, config):
        self.run = None
        if config.wandb == "off":
            return
        try:
            import wandb

            self.run = wandb.init(
                project=config.wandb_project,
                name=Path(config.out_dir).name,
                config=dataclasses.asdict(config),
                mode=config.wandb,
                dir=config.out_dir,
                settings=wandb.Settings(init_timeout=30),
            )
        except Exception as error:
            print(f"warning: wandb is not used: {error}", file=sys.stderr)

    def log(self, row):
        """Sends one row of metrics."""
        self.attempt(lambda run: run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"]))

    def finish(self):
        self.attempt(lambda run: run.finish())

    def attempt(self, action):
        """Calls action(run). Disables the tracker after an error."""
        try:
            if self.run:
                action(self.run)
        except Exception as error:
            tqdm.write(f"warning: wandb is no longer used: {error}", file=sys.stderr)
            self.run = None
