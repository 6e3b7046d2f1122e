"""Experiment trackers: wandb and TensorBoard, each fed by a thread of its own, so that none stops or slows training."""

import contextlib
import dataclasses
import importlib
import json
import os
import queue
import re
import secrets
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanoladder import files
from nanoladder.config import ladder_table
from nanoladder.errors import BadInput

PATIENCE = 60  # seconds that a finished run waits for a tracker
NETWORK_TIMEOUT = 30  # seconds for wandb to answer, to begin a run, and at the end to upload the rest
RESULTS = Path(__file__).parents[2] / "results"  # profile.py's tables


class Tracker:
    """Feeds a dashboard the rows of a run, from a daemon thread. Errors are warnings, and rows go to metrics.jsonl too.

    start_step: the step of the checkpoint from which the run continues; 0 for a new run.
    """

    def __init__(self, name, config, start_step):
        self.name, self.config, self.start_step = name, config, start_step
        self.rows = queue.SimpleQueue()  # None is the end
        self.picture, self.failed = None, False
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def log(self, row):
        """Sends one row of metrics. Returns at once."""
        self.rows.put(row)

    def finish(self, picture, failed):
        """Sends the picture, a path or None, ends the dashboard's run and waits for that, but at most PATIENCE."""
        self.picture, self.failed = picture, failed
        self.rows.put(None)
        self.thread.join(PATIENCE)
        if self.thread.is_alive():
            warn(f"{self.name} has not answered for {PATIENCE} s; it may lack the end of the run")

    def work(self):
        try:
            dashboard = DASHBOARDS[self.name](self.config, self.start_step)
            for row in iter(self.rows.get, None):
                dashboard.log(row)
            dashboard.finish(self.picture, self.failed)
        except (Exception, SystemExit) as error:  # wandb exits when its service has died
            warn(f"{self.name} failed, but training did not: {error}")


class WandB:
    """A run on Weights & Biases, named after out_dir. WANDB_MODE=offline records it in out_dir/wandb for `wandb sync`.

    So does a run that cannot reach wandb at its start. Its id stays in out_dir: a resumed run continues the same one,
    and wandb ignores the steps that it already has.
    """

    module = "wandb"

    def __init__(self, config, start_step):
        import wandb

        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # without a network it delays the exit by 20 s
        run_id = run_id_of(Path(config.out_dir), start_step)
        self.wandb = wandb
        try:
            self.require_login_and_answer()
            limits = {"init_timeout": NETWORK_TIMEOUT, "finish_timeout": NETWORK_TIMEOUT, "finish_timeout_raises": True}
            self.run = self.begin(config, run_id, **limits)
        except Exception as error:
            warn(f"wandb cannot be reached, so the run is recorded offline: {error}")
            self.run = self.begin(config, run_id, mode="offline")
        self.folder = self.run.settings.sync_dir
        tqdm.write(f"wandb: {f'offline; wandb sync {self.folder}' if self.run.offline else self.run.url}")
        self.ladder = ladder_table(config)

    def require_login_and_answer(self):
        """Raises OSError if runs go to wandb's server but nobody is logged in, or the server does not answer."""
        import requests  # a dependency of wandb

        settings = self.wandb.setup(self.wandb.Settings(silent=True)).settings
        if settings.mode != "online":
            return
        if not self.wandb.login(prompt=False, verify=False):
            raise ConnectionError("no API key; `wandb login` stores one")  # a prompt would wait for somebody
        with contextlib.suppress(requests.exceptions.SSLError):  # an answer, too; wandb checks certificates itself
            requests.head(settings.base_url, timeout=NETWORK_TIMEOUT)

    def begin(self, config, run_id, **settings):
        """Returns a wandb run, new or continued. Raises an error if the server refuses it."""
        try:
            return self.wandb.init(
                project=config.wandb_project,
                name=Path(config.out_dir).absolute().name,  # that of . too
                id=run_id,
                resume="allow",
                dir=config.out_dir,
                config=dataclasses.asdict(config),
                settings=self.wandb.Settings(silent=True, **settings),
            )
        except Exception:
            self.wandb.teardown()  # else the id stays in use
            raise

    def log(self, row):
        self.run.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])

    def finish(self, picture, failed):
        try:
            if picture:
                self.run.log({"curves": self.wandb.Image(str(picture))})
            self.log_ladder()
        finally:
            self.end(failed)

    def log_ladder(self):
        """Stores the ladder's table, with this run's values, and the measured tables of results/ as an artifact."""
        artifact = self.wandb.Artifact("ladder", type="ladder")
        with artifact.new_file("ladder.md", encoding="utf-8") as file:
            file.write(self.ladder)
        for path in sorted(RESULTS.glob("*/*/table.md")):
            artifact.add_file(str(path), name=str(path.relative_to(RESULTS.parent)))
        self.run.log_artifact(artifact)

    def end(self, failed):
        try:
            self.run.finish(exit_code=int(failed))
        except TimeoutError:
            warn(f"wandb lacks the end of the run; `wandb sync {self.folder}` uploads it")


class TensorBoard:
    """TensorBoard's event files, in out_dir. A resumed run hides the steps after its checkpoint and logs them again."""

    module = "torch.utils.tensorboard"

    def __init__(self, config, start_step):
        from torch.utils.tensorboard import SummaryWriter

        self.step = start_step + 1
        self.writer = SummaryWriter(config.out_dir, purge_step=self.step, flush_secs=10)
        values = "".join(f"| {key} | {value} |\n" for key, value in dataclasses.asdict(config).items())
        self.writer.add_text("config", f"| key | value |\n| --- | --- |\n{values}", self.step)
        self.writer.add_text("ladder", ladder_table(config), self.step)
        tqdm.write(f"tensorboard: tensorboard --logdir {config.out_dir}")

    def log(self, row):
        self.step = row["step"]
        for key, value in row.items():
            if key == "sample":
                self.writer.add_text(key, textwrap.indent(value, "    "), self.step)  # in Markdown, code
            elif key != "step":
                self.writer.add_scalar(f"metrics/{key}", value, self.step)  # one section of the page for all

    def finish(self, picture, failed):
        with self.writer:  # closes it
            if picture:
                from PIL import Image  # a dependency of matplotlib, which drew the picture

                pixels = np.asarray(Image.open(picture).convert("RGB"))
                self.writer.add_image("curves", pixels, self.step, dataformats="HWC")


DASHBOARDS = {"wandb": WandB, "tensorboard": TensorBoard}


def asked_for(config):
    """Names of the trackers that the config asks for."""
    return [name for name in DASHBOARDS if name in config.track.split(",")]


def require_trackers(config):
    """Raises BadInput if the package of a tracker that the config asks for is missing."""
    for name in asked_for(config):
        try:
            importlib.import_module(DASHBOARDS[name].module)  # here, as a thread's imports would race with training's
        except ImportError as error:
            raise BadInput(
                f"track={config.track}: {name} is not installed ({error}); expected --track=off, or "
                f"python -m pip install {name}"
            ) from None


def start_trackers(config, start_step):
    """Starts a Tracker for each that the config asks for. Returns a list."""
    return [Tracker(name, config, start_step) for name in asked_for(config)]


def run_id_of(folder, start_step):
    """Returns the id of a run on wandb: the one in the folder's trackers.json if it resumes, else a new one."""
    path = folder / "trackers.json"
    if start_step:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            run_id = json.loads(files.read(path))["wandb"]
            if re.fullmatch("[0-9a-f]{8}", run_id):
                return run_id
    run_id = secrets.token_hex(4)
    files.write(path, json.dumps({"wandb": run_id}) + "\n")
    return run_id


def warn(text):
    tqdm.write(f"warning: {' '.join(text.split())}", file=sys.stderr)
