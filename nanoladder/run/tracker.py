"""The run on Weights & Biases if wandb=True, else a dummy, like nanochat's."""

import dataclasses
import os
import sys
from pathlib import Path
from types import SimpleNamespace

TIMEOUT = 30  # seconds for wandb's server to begin a run, and at the end to take the rest of it
UNTRACKED = SimpleNamespace(log=lambda row, step: None, finish=lambda exit_code: None)  # instead of wandb's run


def init_wandb(config):
    """Begins a run on Weights & Biases, named after out_dir, and returns it. If that fails, warns: training goes on.

    WANDB_MODE=offline records the run in out_dir/wandb, for `wandb sync`.
    """
    if not config.wandb:
        return UNTRACKED
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # without a network it delays the exit by 20 s
    name = Path(config.out_dir).absolute().name  # that of . too
    try:
        import wandb

        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "nanoladder"),
            name=name,
            dir=config.out_dir,
            config=dataclasses.asdict(config),
            settings=wandb.Settings(init_timeout=TIMEOUT, finish_timeout=TIMEOUT),
        )
    except (Exception, SystemExit) as error:  # its service, once dead, exits
        print(f"warning: the run continues without wandb: {' '.join(str(error).split())}", file=sys.stderr)
        return UNTRACKED
