"""What profile.py measured, as pictures."""

from summary import KINDS, KNEE, UNCHANGED, gain, milliseconds, summarize

COLORS = {  # of KINDS
    "gemm": "tab:blue",
    "attention": "tab:purple",
    "loss": "tab:red",
    "elementwise": "tab:green",
    "optimizer": "tab:olive",
    "data": "tab:cyan",
    "host": "tab:gray",
}
PARTS = {  # of the peak of memory
    "weights": ("weights", "tab:blue"),
    "kept gradients": ("kept gradients", "tab:cyan"),
    "optimizer": ("optimizer state", "tab:olive"),
    "activations": ("activations", "tab:orange"),
    "rest": ("gradients, temporary", "tab:red"),
}


def draw(results, mode, path):
    """Time and memory of each row, side by side, in what they consist of; of a sweep, as curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if rows := [row for row in summarize(results, mode) if "seconds" in row and ("peak" in row or mode == "scaling")]:
        figure = {"sweep": curves, "scaling": efficiency}.get(mode, bars)(plt, rows)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def bars(plt, rows):
    names = [row["name"] for row in rows]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 1.5 + 0.36 * len(rows)), sharey=True, layout="constrained", width_ratios=[3, 2]
    )
    times = {kind: [1e3 * row["seconds"] * row["shares"][kind] for row in rows] for kind in KINDS}
    speeds = [gain(rows[0], row).partition(" (")[0].replace(UNCHANGED, "≈ 1×") for row in rows]
    labels = [f"{milliseconds(row['seconds'])} ms  {speed}" for row, speed in zip(rows, speeds, strict=True)]
    stack(left, names, times, {kind: (label, COLORS[kind]) for kind, label in KINDS.items()}, labels)
    left.set(title=f"time of a step, ms, and speed against {names[0]}")
    sizes = {part: [parts_of_peak(row["memory"])[part] / 1e9 for row in rows] for part in PARTS}
    labels = [f"{row['peak'] / 1e9:.3g} GB  {rows[0]['peak'] / row['peak']:.3g}×" for row in rows]
    stack(right, names, sizes, PARTS, labels)
    right.set(title="peak memory of all tensors, GB, and times less")
    left.invert_yaxis()
    return figure


def parts_of_peak(memory):
    """The parts that add up to the peak: gradients count where they are there in the forward."""
    kept = memory["peak"] - memory["weights"] - memory["optimizer"] - memory["activations"] - memory["rest"]
    return memory | {"kept gradients": kept}


def stack(axis, names, values, styles, labels):
    """Horizontal bars, each of several parts, with a label at their ends."""
    start = [0.0] * len(names)
    for part, (label, color) in styles.items():
        drawn = axis.barh(names, values[part], left=start, color=color, label=label, height=0.7)
        start = [total + value for total, value in zip(start, values[part], strict=True)]
    axis.bar_label(drawn, labels, padding=4)
    axis.set_xlim(0, 1.3 * max(start))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=3, frameon=False, fontsize="small")


def curves(plt, rows):
    names = [row["name"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(names, [row["tokens_per_s"] for row in rows], marker="o", color="tab:blue")
    left.axhline(KNEE * max(row["tokens_per_s"] for row in rows), color="tab:gray", linestyle=":", linewidth=1)
    left.set(title=f"tokens/s (dotted: {KNEE:.0%} of the best)", xlabel="micro-batches × sequences", ylim=(0, None))
    right.plot(names, [row["peak"] / 1e9 for row in rows], marker="o", color="tab:orange")
    right.set(title="peak memory of all tensors, GB", xlabel="micro-batches × sequences", ylim=(0, None))
    return figure


def efficiency(plt, rows):
    """Throughput over the number of processes, beside as many times that of one."""
    counts = [int(row["name"]) for row in rows]
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    axis.plot(counts, [n * rows[0]["tokens_per_s"] / counts[0] for n in counts], "k:", linewidth=1, label="linear")
    axis.plot(counts, [row["tokens_per_s"] for row in rows], marker="o", label="measured")
    axis.set(title="tokens/s", xlabel="processes", xticks=counts, ylim=(0, None))
    axis.legend()
    return figure
