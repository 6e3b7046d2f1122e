"""Overlays runs in one picture, their losses against tokens and against time, and prints how each ended.

    python -m lab.plot OUT... [--key=val_loss] [--output=FILE.png]

OUT is the out_dir of a run, which may still be training. Time is that of the training steps: evaluating, saving and
compiling are not counted.
"""

import itertools
import json
import math
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
AXES = {"tokens": (1e6, "million tokens"), "seconds": (60, "minutes of the training steps alone")}
FINALS = {  # heading: field, format
    "step": ("step", ",d"),
    "tokens": ("tokens", ",d"),
    "train loss": ("train_loss", ".4f"),
    "validation loss": ("val_loss", ".4f"),
    "best validation": ("best", ".4f"),
    "bits/byte": ("val_bpb", ".4f"),
    "minutes": ("minutes", ".3g"),
    "GB": ("peak_memory_gb", ".2f"),
}
NOT_COMPARED = ("out_dir", "track")


def main(argv):
    parser = Parser(prog="python -m lab.plot", description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("out", nargs="+", type=Path, metavar="OUT", help="out_dir of a run")
    parser.add_argument("--key", default="loss", help="field of metrics.jsonl; loss: train_loss and val_loss")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="the picture; default: OUT/overlay.png")
    options = parser.parse_args(argv)
    output = options.output or options.out[0] / "overlay.png"
    if output.suffix != ".png":
        raise BadInput(f"--output={output}: expected FILE.png, as the picture is a PNG")
    runs = {str(folder): read_rows(folder) for folder in options.out}
    configs = {str(folder): read_config(folder) for folder in options.out}
    keys = CURVES.get(options.key, [options.key])
    found = dict.fromkeys(key for rows in runs.values() for row in rows for key in row)
    if not found.keys() & set(keys):
        expected = f"expected one of {', '.join(found)}" if found else "no step is logged yet"
        raise BadInput(f"--key={options.key}: {expected}")
    try:
        draw(runs, keys, output)
    except OSError as error:
        raise BadInput(f"{output} cannot be written ({error.strerror}); expected --output=FILE.png") from None
    print(table(runs, configs), f"written: {output}", sep="\n\n")


# -- reading


def read_config(folder):
    """The keys in a run's config.json. Raises BadInput."""
    try:
        return dict(json.loads(files.read(folder / "config.json")))
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{folder} is not a run (config.json: {reason}); expected an out_dir of train.py") from None


def read_rows(folder):
    """The rows of a run's metrics.jsonl, with "seconds" of all steps so far if steps were timed. Raises BadInput."""
    path = folder / "metrics.jsonl"
    try:
        rows = [{key: value for key, value in row.items() if key != "sample"} for row in read_metrics(path)]
        if not all(math.isfinite(value) for row in rows for value in (row["step"], row["tokens"], *row.values())):
            raise ValueError("a value is not finite")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise BadInput(f"{path} is damaged ({error!r}); expected the rows that train.py writes") from None
    timed, seconds = [0], [0.0]
    for row in rows:
        if "step_ms" in row:  # the mean since the last row with it; the first step, which is not timed, counts as one
            seconds.append(seconds[-1] + row["step_ms"] / 1e3 * (row["step"] - timed[-1]))
            timed.append(row["step"])
    if len(timed) == 1:
        return rows
    return [{**row, "seconds": float(np.interp(row["step"], timed, seconds))} for row in rows]


# -- the picture and the table


def draw(runs, keys, path):
    """Plots the keys over tokens and over time to a PNG, validation with markers. Raises OSError."""
    figure, axes = subplots(1, 2, figsize=(12, 5), sharey=True)
    for axis, (x, (size, label)) in zip(axes, AXES.items(), strict=True):
        for (name, rows), (line, color) in zip(runs.items(), itertools.cycle(STYLES), strict=False):
            for key in keys:
                behind = key == "train_loss" and len(keys) > 1 and any("val_loss" in row for row in rows)
                style = {"linewidth": 0.8, "alpha": 0.35} if behind else {"linewidth": 1.5, "label": name}
                if key.startswith("val_"):
                    style |= {"marker": "o", "markersize": 3}
                if places := [(place / size, value) for place, value in points(rows, key, x)]:
                    axis.plot(*zip(*places, strict=True), color=color, linestyle=line, **style)
        axis.set(xlabel=label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    if all(key.endswith("_loss") for key in keys):
        curves = [[value for _, value in points(rows, key)] for rows in runs.values() for key in keys]
        late = [value for curve in curves for value in curve[int(STEEP * len(curve)) :]]
        margin = 0.05 * (max(late) - min(late)) or 0.1
        axes[0].set_ylim(min(late) - margin, max(late) + margin)
    axes[0].set(ylabel="loss, nats per token (faint: training)" if len(keys) > 1 else keys[0])
    legend = figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a folder's name, which may have a $
    save(figure, path)


def table(runs, configs):
    """A Markdown table of how far each run came, and of the config keys in which the runs differ."""
    configs = {name: DEFAULTS | config for name, config in configs.items()}  # older runs lack newer keys
    known = [key for key in next(iter(configs.values())) if key not in NOT_COMPARED]
    differing = [key for key in known if len({str(config.get(key)) for config in configs.values()}) > 1]
    rows = []
    for name, logged in runs.items():
        last = {key: value for row in logged for key, value in row.items()}
        if losses := [row["val_loss"] for row in logged if "val_loss" in row]:
            last["best"] = min(losses)
        if "seconds" in last:
            last["minutes"] = last["seconds"] / 60
        cells = {heading: format(last[key], form) for heading, (key, form) in FINALS.items() if key in last}
        cells |= {key: str(configs[name].get(key)) for key in differing}
        rows.append({"name": name, "note": None if logged else "no step is logged", **cells})
    columns = {heading: lambda row, heading=heading: row.get(heading, "") for heading in [*FINALS, *differing]}
    return markdown(columns, rows)


if __name__ == "__main__":
    run_script(main)
