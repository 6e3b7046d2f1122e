"""Overlays runs in one picture, their losses against tokens and against time, each with its last value.

    python -m lab.plot OUT... [--key=val_loss] [--output=FILE.png]

OUT is the out_dir of a run, which may still be training. Time is that of the training steps: evaluating, saving and
compiling are not counted.
"""

import itertools
from pathlib import Path
from nanoladder.entry import Parser, run_script

import numpy as np

from lab.pictures import LINES, subplots
from nanoladder.errors import BadInput
from nanoladder.run.metrics import read_metrics
from nanoladder.run.plot import points, save

CURVES = {"loss": ["train_loss", "val_loss"]}  # fields that --key=loss draws; another key is a field itself
AXES = {"tokens": (1e6, "million tokens"), "seconds": (60, "minutes of the training steps alone")}


def main(argv):
    parser = Parser(prog="python -m lab.plot", description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("out", nargs="+", type=Path, metavar="OUT", help="out_dir of a run")
    parser.add_argument("--key", default="loss", help="field of metrics.jsonl; loss: train_loss and val_loss")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="the picture; default: OUT/overlay.png")
    options = parser.parse_args(argv)
    output = options.output or options.out[0] / "overlay.png"
    runs = {}
    for folder in options.out:
        if not (folder / "config.json").exists():
            raise BadInput(f"{folder} is not a run: it has no config.json; expected an out_dir of train.py")
        runs[str(folder)] = timed(read_metrics(folder / "metrics.jsonl"))
    keys = CURVES.get(options.key, [options.key])
    found = dict.fromkeys(key for rows in runs.values() for row in rows for key in row)
    if not found.keys() & set(keys):
        expected = f"expected one of {', '.join(found)}" if found else "no step is logged yet"
        raise BadInput(f"--key={options.key}: {expected}")
    try:
        draw(runs, keys, output)
    except (OSError, ValueError) as error:
        raise BadInput(f"{output} cannot be written ({error}); expected --output=FILE.png") from None
    print(f"written: {output}")


def timed(rows):
    """The rows with "seconds" of all steps so far, if steps were timed."""
    ends, seconds = [0], [0.0]
    for row in rows:
        if "step_ms" in row:  # the mean since the last row with it; the first step, which is not timed, counts as one
            seconds.append(seconds[-1] + row["step_ms"] / 1e3 * (row["step"] - ends[-1]))
            ends.append(row["step"])
    if len(ends) == 1:
        return rows
    return [{**row, "seconds": float(np.interp(row["step"], ends, seconds))} for row in rows]


def draw(runs, keys, path):
    """Plots the keys over tokens and over time to a PNG, validation with markers. Raises OSError."""
    figure, axes = subplots(1, 2, figsize=(12, 5), sharey=True)
    styles = list(zip(runs.items(), itertools.cycle(itertools.product(["-", "--", ":"], LINES)), strict=False))
    for axis, (x, (size, label)) in zip(axes, AXES.items(), strict=True):
        for ((name, rows), (line, color)), key in itertools.product(styles, keys):
            behind = key == "train_loss" and len(keys) > 1 and any("val_loss" in row for row in rows)
            style = {"linewidth": 0.8, "alpha": 0.35} if behind else {"linewidth": 1.5}
            if key.startswith("val_"):
                style |= {"marker": "o", "markersize": 3}
            if places := [(place / size, value) for place, value in points(rows, key, x)]:
                if not behind:
                    style["label"] = f"{name}: {places[-1][1]:.4g}"
                axis.plot(*zip(*places, strict=True), color=color, linestyle=line, **style)
        axis.set(xlabel=label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    if all(key.endswith("_loss") for key in keys):  # the axis leaves out the steep start
        curves = [points(rows, key) for rows in runs.values() for key in keys]
        late = [value for curve in curves for _, value in curve[len(curve) // 10 :]]
        axes[0].set_ylim(min(late) - 0.05, max(late) + 0.05)
    axes[0].set(ylabel="loss, nats per token (faint: training)" if len(keys) > 1 else keys[0])
    legend = figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a folder's name, which may have a $
    save(figure, path)


if __name__ == "__main__":
    run_script(main)
