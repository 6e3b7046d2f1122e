"""Metrics of a run: metrics.jsonl, the lines on the terminal, and the curves of loss.png."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from nanoladder import files
from nanoladder.errors import reading
from nanoladder.run.tracker import init_wandb

METRICS = "metrics.jsonl"  # in out_dir
COLUMNS = [  # key, label and format of each value in a line on the terminal
    ("step", "step", "5d"),
    ("train_loss", "train", ".4f"),
    ("val_loss", "val", ".4f"),
    ("val_bpb", "bits/byte", ".4f"),
    ("lr", "lr", ".2e"),
    ("grad_norm", "grad norm", ".2f"),
    ("step_ms", "ms/step", ".1f"),
    ("tokens_per_s", "tokens/s", ",.0f"),
    ("mfu", "mfu", ".1%"),
    ("peak_memory_gb", "GB", ".2f"),
    ("minutes_left", "min left", ",.1f"),
]


def read_metrics(path: Path) -> list[dict]:
    """Returns the rows, dicts, of a metrics.jsonl, skipping lines that a crash left damaged; [] if there is no file.

    Raises BadInput if it is not a regular file, or cannot be read.
    """
    return [row for row in read_lines(path) if isinstance(row, dict)]


def read_lines(path):
    """Returns what each line of a file of JSON holds; None if it is not JSON."""
    if not os.path.lexists(path):
        return []
    with reading(f"{path} cannot be read", "remove it, or repair it"):
        content = files.read(path, limit=2**30)
    return [parse(line) for line in content.decode(errors="replace").splitlines()]


def parse(line):
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def is_row(row):
    """True for a row of metrics: numbers, one of which is the step."""
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return False
    return all(type(value) in (int, float) and -1e300 < value < 1e300 for value in row.values())


def earlier_rows(out_dir, step):
    """Returns the rows of a run's metrics up to a step. Names the lines that are something else, which resuming drops.

    Raises BadInput as read_metrics() does.
    """
    path = Path(out_dir, METRICS)
    lines = read_lines(path)
    if others := [str(number) for number, row in enumerate(lines, 1) if not is_row(row)]:
        print(f"warning: {path} loses what is not a row of metrics: line {', '.join(others):.50}", file=sys.stderr)
    return [row for row in lines if is_row(row) and row["step"] <= step]


def plot(rows, path, title, counted):
    """Plots the losses over the steps to a PNG.

    rows: one dict of metrics per logged step. counted: {name: loss} of counted predictions, drawn as lines.
    """
    from matplotlib.figure import Figure  # loads slowly; unlike pyplot, needs no screen and keeps no figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (("train_loss", "train", "-"), ("val_loss", "validation", "o-")):
        measured = [row for row in rows if key in row]
        axes.plot([row["step"] for row in measured], [row[key] for row in measured], style, label=label, markersize=4)
        title += f", {label} {measured[-1][key]:.3f}" if measured else ""
    draw_counted(axes, counted)
    axes.set_title(title, parse_math=False)  # a folder's name, which may have a $
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    axes.grid(alpha=0.3)
    files.write(path, lambda file: figure.savefig(file, dpi=120, format="png"))


def draw_counted(axes: Any, losses: dict[str, float]) -> None:
    """Draws the losses of counted predictions, {name: loss}, as lines across a plot of losses."""
    for name, loss in losses.items():
        axes.axhline(loss, color="gray", linewidth=0.8, linestyle=":", zorder=0)
        axes.annotate(name, (1, loss), xycoords=axes.get_yaxis_transform(), ha="right", va="bottom", color="gray")


class Metrics:
    """Writes a run's metrics to out_dir/metrics.jsonl, the terminal, out_dir/loss.png and the tracker.

    Only in the first process. rows: of a run that resumes, earlier_rows().
    """

    def __init__(self, config, rows, counted):
        self.config, self.rows, self.counted = config, rows, counted
        self.folder = Path(config.out_dir)
        self.path = self.folder / METRICS
        self.write_all()
        self.tracker = init_wandb(config)

    def write(self, row):
        """Stores one row of metrics and prints it as a line."""
        row = {key: value for key, value in row.items() if math.isfinite(value)}
        self.rows.append(row)
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:  # training continues: the file is rewritten at the end
            print(f"warning: {self.path.name} lacks step {row['step']}: {error}", file=sys.stderr)
        self.tracker.log(row, step=row["step"])
        left = (self.config.max_steps - row["step"]) * row.get("step_ms", math.nan) / 60e3
        shown = row | ({"minutes_left": left} if "step_ms" in row else {})
        print("  ".join(f"{label} {shown[key]:{form}}" for key, label, form in COLUMNS if key in shown))

    def write_all(self):
        files.write(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        crashed = failure and issubclass(failure, Exception)  # possibly out of memory, which plotting needs
        try:
            self.write_all()  # with the rows that could not be appended
            if self.rows and not crashed:
                plot(self.rows, self.folder / "loss.png", self.folder.absolute().name, self.counted)
        except OSError as error:
            if not crashed:
                sys.exit(f"error: {self.folder} lacks rows of {self.path.name}, or loss.png: {error}")
        finally:
            self.tracker.finish(int(failure is not None))
