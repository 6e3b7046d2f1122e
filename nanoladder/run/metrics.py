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
# Key and text of each value in a row's lines on the terminal, of 80 columns: one of training, one of an evaluation.
TRAINING = {
    "train_loss": "loss {:7.4f}",
    "grad_norm": "norm {:5.2f}",
    "tokens_per_s": "{:7,.0f} tok/s",
    "mfu": "{:3.0%} mfu",
    "minutes_left": "{:4.1f} min left",
    "hours_left": "{:4.1f} h left",
}
EVALUATION = {"val_loss": "val  {:7.4f}", "val_bpb": "bpb  {:.4f}", "lr": "lr {:.1e}", "peak_memory_gb": "{:.2f} GB"}


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


def lines(row: dict, max_steps: int) -> list[str]:
    """Returns the lines of a row of metrics on the terminal: of training, of its evaluation, or both."""
    n_left, shown = max_steps - row["step"], dict(row)
    if n_left and "step_ms" in row:
        minutes = n_left * row["step_ms"] / 60e3
        shown |= {"minutes_left": minutes} if minutes < 100 else {"hours_left": minutes / 60}
    kinds = [kind for kind in (TRAINING, EVALUATION) if next(iter(kind)) in row]
    step = f"step {row['step']:{len(str(max_steps))}d}"
    return [
        "  ".join([step, *(text.format(shown[key]) for key, text in kind.items() if key in shown)]) for kind in kinds
    ]


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
        print("\n".join(lines(row, self.config.max_steps)))

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
