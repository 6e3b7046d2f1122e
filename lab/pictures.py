"""The figure of a mode's results: time and memory of a step, a bar for each row."""

import textwrap

from lab.summary import UNCHANGED, speedup, summarize
from lab.tables import KINDS, device, milliseconds

COLORS = {  # kind of work: color
    "gemm": "tab:blue",
    "attention": "tab:purple",
    "loss": "tab:red",
    "elementwise": "tab:green",
    "optimizer": "tab:olive",
    "data": "tab:cyan",
    "host": "tab:gray",
}
LINES = ["black", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7"]  # colorblind-safe, Okabe & Ito 2008
PARTS = {  # part of the peak memory: label, color
    "weights": ("weights", "tab:blue"),
    "kept gradients": ("kept gradients", "tab:cyan"),
    "optimizer": ("optimizer state", "tab:olive"),
    "activations": ("activations", "tab:orange"),
    "rest": ("gradients, temporary", "tab:red"),
}


def subplots(*shape, figsize, **options):
    """A figure, which needs no screen, and its axes."""
    from matplotlib.figure import Figure  # takes a second to load

    figure = Figure(figsize=figsize, layout="constrained")
    return figure, figure.subplots(*shape, **options)


def draw(results, mode, path):
    """Plots the rows of a mode, time and memory in stacked bars, to a file. Returns False if no row has both."""
    rows = [row for row in summarize(results, mode) if {"seconds", "shares"} <= row.keys()]
    if rows:
        figure = bars(rows)
        title = f"{mode}: {' '.join(results['config']) or 'the defaults'}\n{device(results)}"
        width = int(9 * figure.get_figwidth())  # characters
        lines = [line for part in title.splitlines() for line in textwrap.wrap(part, width, break_on_hyphens=False)]
        figure.suptitle("\n".join(lines), fontsize="large", parse_math=False)  # a word may have a $
        figure.savefig(path, dpi=110)
    return bool(rows)


def bars(rows):
    names = [row["name"] for row in rows]
    figure, (left, right) = subplots(1, 2, figsize=(12, 2 + 0.36 * len(rows)), sharey=True, width_ratios=[3, 2])
    times = {kind: [1e3 * row["seconds"] * row["shares"][kind] for row in rows] for kind in KINDS}
    speeds = [speedup(rows[0], row).partition(" (")[0].replace(UNCHANGED, "≈ 1×") for row in rows]
    labels = [f"{milliseconds(row['seconds'])} ms  {speed}" for row, speed in zip(rows, speeds, strict=True)]
    stack(left, names, times, {kind: (label, COLORS[kind]) for kind, label in KINDS.items()}, labels)
    limits = {row["name"]: 1e3 * row["limit"] for row in rows if "limit" in row}
    left.scatter(limits.values(), limits.keys(), marker="|", s=150, color="black", zorder=3)
    left.set(title=f"time of a step, ms, and speed against {names[0]}{' (black: its limit)' if limits else ''}")
    sizes = {part: [parts_of_peak(row["memory"])[part] / 1e9 for row in rows] for part in PARTS}
    labels = [f"{row['peak'] / 1e9:.3g} GB  {rows[0]['peak'] / row['peak']:.3g}×" for row in rows]
    stack(right, names, sizes, PARTS, labels)
    right.set(title="peak memory of all tensors, GB, and its reduction")
    left.invert_yaxis()
    return figure


def parts_of_peak(memory):
    """Returns the memory parts plus gradients kept during the forward, so that PARTS add up to the peak. In bytes."""
    kept = memory["peak"] - memory["weights"] - memory["optimizer"] - memory["activations"] - memory["rest"]
    return memory | {"kept gradients": kept}


def stack(axis, names, values, styles, labels):
    """Draws stacked horizontal bars, with a label at the end of each, and their key below."""
    from matplotlib.transforms import ScaledTranslation

    start = [0.0] * len(names)
    for part, (label, color) in styles.items():
        drawn = axis.barh(names, values[part], left=start, color=color, label=label, height=0.7)
        start = [total + value for total, value in zip(start, values[part], strict=True)]
    axis.bar_label(drawn, labels, padding=4)
    axis.set_xlim(0, 1.3 * max(start))
    axis.spines[["top", "right"]].set_visible(False)
    below = axis.transAxes + ScaledTranslation(0, -0.25, axis.figure.dpi_scale_trans)  # a quarter of an inch
    style = {"ncols": 3, "frameon": False, "fontsize": "small"}
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below, **style)
