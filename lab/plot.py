"""Overlays the losses of runs in one picture: python -m lab.plot OUT... [--key=val_loss] [--output=FILE.png]

OUT is the out_dir of a run, which may still be training. The last value of each run stands beside its name.
"""

from pathlib import Path
from nanoladder.entry import Parser, run_script

from nanoladder.errors import BadInput
from nanoladder.run.metrics import read_metrics
from nanoladder.run.plot import points, save

# Colorblind-safe, Okabe & Ito 2008
COLORS = ["black", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7"]


def main(argv):
    parser = Parser(prog="python -m lab.plot", description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("out", nargs="+", type=Path, metavar="OUT", help="out_dir of a run")
    parser.add_argument("--key", default="val_loss", help="field of metrics.jsonl (default: val_loss)")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="the picture; default: OUT/overlay.png")
    options = parser.parse_args(argv)
    runs = {}
    for folder in options.out:
        if not (folder / "config.json").exists():
            raise BadInput(f"{folder} is not a run: it has no config.json; expected an out_dir of train.py")
        rows = read_metrics(folder / "metrics.jsonl")
        runs[str(folder)] = [(tokens / 1e6, value) for tokens, value in points(rows, options.key, "tokens")]
        if not runs[str(folder)]:
            fields = ", ".join(dict.fromkeys(key for row in rows for key in row)) or "a run that has logged a step"
            raise BadInput(f"--key={options.key}: {folder} has no such field; expected one of {fields}")
    output = options.output or options.out[0] / "overlay.png"
    try:
        draw(runs, options.key, output)
    except (OSError, ValueError) as error:
        raise BadInput(f"{output} cannot be written ({error}); expected --output=FILE.png") from None
    print(f"written: {output}")


def draw(runs, key, path):
    """Plots {run: [(million tokens, value of the key)]} to a PNG. Raises OSError."""
    from matplotlib.figure import Figure  # takes a second to load, and needs no screen

    figure = Figure(figsize=(9, 6), layout="constrained")
    axis = figure.subplots()
    axis.set_prop_cycle(color=COLORS)
    for name, curve in runs.items():
        axis.plot(*zip(*curve, strict=True), marker=".", label=f"{name}: {curve[-1][1]:.4g}")
    late = [value for curve in runs.values() for _, value in curve[len(curve) // 10 :]]  # without the steep start
    margin = 0.05 * (max(late) - min(late)) or 0.05
    axis.set(xlabel="million tokens", ylabel=key, ylim=(min(late) - margin, max(late) + margin))
    axis.grid(alpha=0.3)
    for text in axis.legend().get_texts():
        text.set_parse_math(False)  # a folder's name, which may have a $
    save(figure, path)


if __name__ == "__main__":
    run_script(main)
