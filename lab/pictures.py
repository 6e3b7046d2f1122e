"""Figures of measured results, one for each mode."""

import itertools
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
BOUNDS = {  # what bounds an operation: label, color
    "compute": ("bound by compute", "tab:blue"),
    "memory": ("by memory", "tab:orange"),
    "launches": ("by launches", "tab:gray"),
}
PARTS = {  # part of the peak memory: label, color
    "weights": ("weights", "tab:blue"),
    "kept gradients": ("kept gradients", "tab:cyan"),
    "optimizer": ("optimizer state", "tab:olive"),
    "activations": ("activations", "tab:orange"),
    "rest": ("gradients, temporary", "tab:red"),
}


def heading(mode, config, machine):
    """The lines above a picture: its mode and the words of the config; the machine in words."""
    return f"{mode}: {' '.join(config) or 'the defaults'}\n{machine}"


def subplots(*shape, figsize, **options):
    """A figure, which needs no screen, and its axes."""
    from matplotlib.figure import Figure  # takes a second to load

    figure = Figure(figsize=figsize, layout="constrained")
    return figure, figure.subplots(*shape, **options)


def save(figure, title, path):
    """Writes a figure to a file, with its title above it."""
    width = int(9 * figure.get_figwidth())  # characters
    lines = [line for part in title.splitlines() for line in textwrap.wrap(part, width, break_on_hyphens=False)]
    figure.set_figheight(figure.get_figheight() + 0.25 * len(lines))
    figure.suptitle("\n".join(lines), fontsize="large", parse_math=False)  # a word may have a $
    figure.savefig(path, dpi=110)


def draw(results, mode, path):
    """Plots a mode's rows to a file: stacked bars of time and memory; curves for scaling and optimizers."""
    kind = mode.partition("-")[0]  # scaling-tensor is drawn as scaling is
    needed = {"scaling": {"seconds"}, "optimizers": {"best"}}.get(kind, {"seconds", "peak"})
    if rows := [row for row in summarize(results, mode) if needed <= row.keys()]:
        figure = {"scaling": efficiency, "optimizers": training}.get(kind, bars)(rows)
        save(figure, heading(mode, results["config"], device(results)), path)


def bars(rows):
    names = [row["name"] for row in rows]
    figure, (left, right) = subplots(1, 2, figsize=(12, 1.5 + 0.36 * len(rows)), sharey=True, width_ratios=[3, 2])
    times = {kind: [1e3 * row["seconds"] * row["shares"][kind] for row in rows] for kind in KINDS}
    speeds = [speedup(rows[0], row).partition(" (")[0].replace(UNCHANGED, "≈ 1×") for row in rows]
    labels = [f"{milliseconds(row['seconds'])} ms  {speed}" for row, speed in zip(rows, speeds, strict=True)]
    stack(left, names, times, {kind: (label, COLORS[kind]) for kind, label in KINDS.items()}, labels)
    limits = {row["name"]: 1e3 * row["limit"] for row in rows if "limit" in row}
    left.scatter(limits.values(), limits.keys(), marker="|", s=150, color="black", zorder=3)
    left.set(title=f"time of a step, ms, and speed against {names[0]}" + " (black: its limit)" * bool(limits))
    sizes = {part: [parts_of_peak(row["memory"])[part] / 1e9 for row in rows] for part in PARTS}
    labels = [f"{row['peak'] / 1e9:.3g} GB  {rows[0]['peak'] / row['peak']:.3g}×" for row in rows]
    stack(right, names, sizes, PARTS, labels)
    right.set(title="peak memory of all tensors, GB, and its reduction")
    left.invert_yaxis()
    return figure


def draw_least_times(rows, title, path):
    """Plots the rows of predict.predict_row to a file: the least time of each, by bound, and when fused."""
    if not (rows := [row for row in rows if not row["note"]]):
        return
    names = [row["name"] for row in rows]
    figure, axis = subplots(figsize=(9, 1.5 + 0.36 * len(rows)))
    times = {bound: [1e3 * row["time"].by(1).get(bound, 0.0) for row in rows] for bound in BOUNDS}
    labels = [f"{milliseconds(row['seconds'])} ms  {rows[0]['seconds'] / row['seconds']:.3g}×" for row in rows]
    stack(axis, names, times, BOUNDS, labels)
    axis.scatter([1e3 * row["time"].fused for row in rows], names, marker="|", s=150, color="black", label="all fused")
    axis.legend(loc="lower right", frameon=False, fontsize="small")
    axis.set(title=f"least time of a step, ms, by what bounds it, and speed against {names[0]}")
    axis.invert_yaxis()
    save(figure, title, path)


def parts_of_peak(memory):
    """Returns the memory parts plus gradients kept during the forward, so that PARTS add up to the peak. In bytes."""
    kept = memory["peak"] - memory["weights"] - memory["optimizer"] - memory["activations"] - memory["rest"]
    return memory | {"kept gradients": kept}


def stack(axis, names, values, styles, labels):
    """Draws stacked horizontal bars, with a label at the end of each."""
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


def efficiency(rows):
    """Plots throughput over the number of processes, against linear scaling."""
    counts = [int(row["name"]) for row in rows]
    figure, axis = subplots(figsize=(6, 4))
    axis.plot(counts, [n * rows[0]["tokens_per_s"] / counts[0] for n in counts], "k:", linewidth=1, label="linear")
    axis.plot(counts, [row["tokens_per_s"] for row in rows], marker="o", label="measured")
    axis.set(xlabel="processes", ylabel="tokens/s of all processes", xticks=counts, ylim=(0, None))
    axis.legend()
    return figure


def training(rows):
    """Plots each row's training loss at its best learning rate, and its sensitivity to the learning rate."""
    figure, (left, right) = subplots(1, 2, figsize=(12, 5), width_ratios=[3, 2])
    styles = [{"color": color, "linewidth": 1.5, "zorder": 2} for color, _ in zip(itertools.cycle(LINES), rows)]
    styles[0] |= {"linestyle": "--", "zorder": 3}  # the baseline
    top = learning_curves(left, rows, styles)
    sensitivity(right, rows, styles)
    right.set_ylim(top=min(top, right.get_ylim()[1]))
    for axis in (left, right):
        axis.set_ylabel("nats per token")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    return figure


def learning_curves(axis, rows, styles):
    """Plots losses over tokens, labeled at their ends. Returns the axis's top, which cuts off the steep start."""
    curves = [row["curves"][row["best"]] for row in rows]
    for curve, style in zip(curves, styles, strict=True):
        axis.plot([tokens / 1e6 for tokens in curve["tokens"]], curve["losses"], **style)
    top = max(curve["losses"][len(curve["losses"]) // 10] for curve in curves)
    bottom = min(min(curve["losses"]) for curve in curves)
    gap, end = 0.05 * (top - bottom), curves[0]["tokens"][-1] / 1e6
    heights = spread([curve["losses"][-1] for curve in curves], gap)
    for row, height, style in zip(rows, heights, styles, strict=True):
        axis.text(1.02 * end, height, f"{row['name']}, {row['best']:g}×", color=style["color"], va="center")
    title = "training loss, each with its best learning rate"
    axis.set(title=title, xlabel="million tokens", xlim=(0, 1.25 * end), ylim=(bottom - gap, top))
    return top


def sensitivity(axis, rows, styles):
    """Plots final validation losses over learning rates; a larger dot marks the best, a cross a diverged run."""
    grid = sorted({factor for row in rows for factor in row["curves"]})
    crosses = dict.fromkeys(grid, 0)
    for row, style in zip(rows, styles, strict=True):
        losses = {factor: curve["val_loss"] for factor, curve in row["curves"].items()}  # None if it diverged
        axis.plot(losses.keys(), losses.values(), marker="o", ms=4, **style)
        axis.plot(row["best"], row["val_loss"], "o", ms=9, **style)
        for factor in (factor for factor in losses if losses[factor] is None):
            height = 1 - 0.04 * crosses[factor]
            axis.plot(factor, height, "x", ms=8, mew=2, transform=axis.get_xaxis_transform(), clip_on=False, **style)
            crosses[factor] += 1
    axis.set(xscale="log", title="validation loss at the end", xlabel="learning rate, times its own (cross: diverged)")
    axis.set_xticks(grid, [f"{factor:g}×" for factor in grid])
    axis.set_xticks([], minor=True)


def draw_rounds(effect, metric, title, path):
    """Plots the changes of a judgment's rounds to a file: dots, their median and its interval, and equal versions."""
    changes, equal = ([metric.scale * change for change in part] for part in (effect.changes, effect.equal))
    middle, low, high = (metric.scale * bound for bound in (effect.change, effect.low, effect.high))
    figure, axis = subplots(figsize=(8, 4))
    axis.plot(range(1, 1 + len(changes)), changes, "o", color=LINES[4], label="a round: this against other")
    axis.plot(
        [n + 0.5 for n in range(1, 1 + len(equal))], equal, "x", color="tab:gray", label="one version beside itself"
    )
    axis.axhspan(low, high, color=LINES[2], alpha=0.3, linewidth=0, label="interval")
    axis.axhline(middle, color=LINES[4], linewidth=1.5, label="median change")
    axis.axhline(0, color="black", linewidth=0.8)
    ascending = sorted([*changes, *equal])
    cut = len(ascending) // 10  # outliers leave the picture
    bottom, top = min(low, ascending[cut]), max(high, ascending[-1 - cut])
    edge = 0.1 * (top - bottom) or 1.0
    axis.set_ylim(bottom - edge, top + edge)
    outside = sum(not bottom - edge <= change <= top + edge for change in ascending)
    xlabel = f"round (outside the picture: {outside})" if outside else "round"
    axis.set(xlabel=xlabel, ylabel=f"change of {metric.heading},{metric.unit}")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    save(figure, title, path)


def spread(values, gap):
    """Moves the values until neighbors are at least `gap` apart."""
    order, moved = sorted(range(len(values)), key=values.__getitem__), list(values)
    for _ in range(100):
        for low, high in itertools.pairwise(order):
            lack = max(0, gap - (moved[high] - moved[low])) / 2
            moved[low], moved[high] = moved[low] - lack, moved[high] + lack
    return moved
