"""Overlays runs in one picture, their losses against tokens and against time, and prints how each ended.

    python -m lab.plot OUT... [--key=val_loss] [--output=FILE.png]

OUT is the out_dir of a run, which may still be training. Time is that of the training steps: evaluating, saving and
compiling are not counted.
"""

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from nanoladder.entry import Parser, run_script

import numpy as np

from lab.pictures import LINES, subplots
from lab.tables import markdown
from nanoladder import files
from nanoladder.config import DEFAULTS
from nanoladder.errors import BadInput
from nanoladder.run.metrics import read_metrics
from nanoladder.run.plot import points, save

CURVES = {"loss": ["train_loss", "val_loss"]}  # fields that --key=loss draws; another key is a field itself
STEEP = 0.1  # share of a run, its steep start, that the axis of a loss leaves out
STYLES = list(itertools.product(["-", "--", ":"], LINES))
UNITS = {  # of an axis; the largest that is reached counts
    "tokens": {"billion tokens": 1e9, "million tokens": 1e6, "thousand tokens": 1e3, "tokens": 1},
    "seconds": {"hours": 3600, "minutes": 60, "seconds": 1},
}
FINALS = {  # heading: field, format
    "step": ("step", ",d"),
    "tokens": ("tokens", ",d"),
    "train loss": ("train_loss", ".4f"),
    "validation loss": ("val_loss", ".4f"),
    "bits/byte": ("val_bpb", ".4f"),
}
NOT_COMPARED = ("out_dir", "overwrite", "track", "wandb_project")


@dataclass
class Run:
    """A run in its out_dir. rows: those of metrics.jsonl, with the "seconds" that all steps so far took."""

    name: str
    config: dict
    rows: list


def main(argv):
    parser = Parser(prog="python -m lab.plot", description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("out", nargs="+", type=Path, metavar="OUT", help="out_dir of a run")
    parser.add_argument("--key", default="loss", help="field of metrics.jsonl; loss: train_loss and val_loss")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="the picture; default: OUT/overlay.png")
    options = parser.parse_args(argv)
    if options.output and options.output.suffix != ".png":
        raise BadInput(f"--output={options.output}: expected FILE.png, as the picture is a PNG")
    runs = read_runs(options.out)
    keys, output = CURVES.get(options.key, [options.key]), options.output or options.out[0] / "overlay.png"
    found = dict.fromkeys(key for run in runs for row in run.rows for key in row)
    if not found.keys() & set(keys):
        expected = f"expected one of {', '.join(found)}" if found else "no step is logged yet"
        raise BadInput(f"--key={options.key}: {expected}")
    try:
        draw(runs, keys, output)
    except OSError as error:
        raise BadInput(f"{output} cannot be written ({error.strerror}); expected --output=FILE.png") from None
    print(finals(runs), *differences(runs), f"written: {output}", sep="\n\n")


# -- reading


def read_runs(folders):
    """Reads each run once. A run is named by its folder, or by its path if two folders have the same name."""
    folders = list(dict.fromkeys(folder.resolve() for folder in folders))
    names = [folder.name for folder in folders]
    return [
        Run(str(folder) if names.count(folder.name) > 1 else folder.name, read_config(folder), read_rows(folder))
        for folder in folders
    ]


def read_config(folder):
    """Returns the keys in a run's config.json. Raises BadInput."""
    try:
        return dict(json.loads(files.read(folder / "config.json")))
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{folder} is not a run (config.json: {reason}); expected an out_dir of train.py") from None


def read_rows(folder):
    """Returns the rows of a run's metrics.jsonl with "seconds" if steps were timed. Raises BadInput."""
    path = folder / "metrics.jsonl"
    try:
        rows = [{key: value for key, value in row.items() if key != "sample"} for row in read_metrics(path)]
        steps = [row["step"] for row in rows]
        if not all(math.isfinite(value) for row in rows for value in (row["tokens"], *row.values())):
            raise ValueError("a value is not finite")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise BadInput(f"{path} is damaged ({error!r}); expected the rows that train.py writes") from None
    timed, seconds = [0], [0.0]
    for row in rows:
        if "step_ms" in row:  # the mean since the last row with it; the first step, which is not timed, counts as one
            seconds.append(seconds[-1] + row["step_ms"] / 1e3 * (row["step"] - timed[-1]))
            timed.append(row["step"])
    if len(timed) == 1:
        return rows
    times = np.interp(steps, timed, seconds).tolist()
    return [{**row, "seconds": time} for row, time in zip(rows, times, strict=True)]


# -- the picture


def draw(runs, keys, path):
    """Plots the keys over tokens and over time to a PNG, validation with markers. Raises OSError."""
    figure, axes = subplots(1, 2, figsize=(12, 5), sharey=True)
    for axis, x in zip(axes, UNITS, strict=True):
        unit, size = unit_of(runs, x)
        for run, (line, color) in zip(runs, itertools.cycle(STYLES), strict=False):
            curves = {key: places for key in keys if (places := points(run.rows, key, x))}
            for key, places in curves.items():
                style = {"linestyle": line, "linewidth": 1.5, "label": run.name}
                if key.startswith("val_"):
                    style |= {"marker": "o", "markersize": 3}
                elif len(curves) > 1:  # the training loss, behind the validation loss
                    style |= {"linewidth": 0.8, "alpha": 0.35, "label": None}
                axis.plot([place / size for place, _ in places], [value for _, value in places], color=color, **style)
        axis.set(xlabel=unit)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    if all(key.endswith("_loss") for key in keys):
        axes[0].set_ylim(window(runs, keys))
    axes[0].set(ylabel="loss, nats per token (faint: training)" if len(keys) > 1 else keys[0], title="against tokens")
    axes[1].set(title="against time, of the training steps alone")
    legend = figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a folder's name, which may have a $
    save(figure, path)


def unit_of(runs, x):
    """Returns the name and the size of the largest unit of an axis that a run reaches."""
    longest = max((row.get(x, 0) for run in runs for row in run.rows), default=0)
    return next(((unit, size) for unit, size in UNITS[x].items() if longest >= size), (x, 1))


def window(runs, keys):
    """Returns the bottom and top of an axis of losses, without the steep start of each run."""
    curves = [[value for _, value in points(run.rows, key)] for run in runs for key in keys]
    late = [value for curve in curves for value in curve[int(STEEP * len(curve)) :]]
    margin = 0.05 * (max(late) - min(late)) or 0.1
    return min(late) - margin, max(late) + margin


# -- the tables


def finals(runs):
    """Returns a Markdown table of how far each run came: last values, best validation loss, cost."""
    return table(
        {run.name: final(run) for run in runs}, {run.name: "no step is logged" for run in runs if not run.rows}
    )


def final(run):
    """Returns {heading: text} of a run, of what was measured."""
    last = {key: value for row in run.rows for key, value in row.items()}
    evaluated = [row for row in run.rows if "val_loss" in row]
    texts = {heading: format(last[key], form) for heading, (key, form) in FINALS.items() if key in last}
    if run.rows and last["step"] < run.config.get("max_steps", 0):
        texts["step"] += f" of {run.config['max_steps']:,}"
    if evaluated:
        best = min(evaluated, key=lambda row: row["val_loss"])
        texts["best validation"] = f"{best['val_loss']:.4f} at {best['step']:,}"
    if last.get("seconds"):
        unit, size = unit_of([run], "seconds")
        texts["time"] = f"{last['seconds'] / size:.3g} {unit}"
        texts["tokens/s"] = f"{last['tokens'] / last['seconds']:,.0f}"
    if sizes := [row["peak_memory_gb"] for row in run.rows if "peak_memory_gb" in row]:
        texts["GB"] = f"{max(sizes):.2f}"
    return texts


def differences(runs):
    """Yields a Markdown table of the config keys in which the runs differ, if there are any."""
    rows = {}
    for key in dict.fromkeys([*DEFAULTS, *(key for run in runs for key in run.config)]):
        values = [str(run.config.get(key, DEFAULTS.get(key, ""))) for run in runs]  # older runs lack newer keys
        if len(set(values)) > 1 and key not in NOT_COMPARED:
            rows[key] = dict(zip((run.name for run in runs), values, strict=True))
    if rows:
        yield table(rows)


def table(rows, notes=()):
    """Returns a Markdown table of {name: {heading: text}}; a row with a note has nothing else."""
    headings = dict.fromkeys(heading for row in rows.values() for heading in row)
    columns = {heading: lambda row, heading=heading: row.get(heading, "") for heading in headings}
    return markdown(columns, [{"name": name, "note": dict(notes).get(name), **row} for name, row in rows.items()])


if __name__ == "__main__":
    run_script(main)
