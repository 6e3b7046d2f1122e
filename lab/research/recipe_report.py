"""The report of --mode=recipe: recipe.json with all figures, recipe.md with a table, and recipe.png."""

import json
import math
import statistics

from lab.measure import tables
from lab.measure.results import write
from lab.measure.runs import RUNS
from lab.measure.stats import LEAST, LEVEL, Interval, intervals
from nanoladder import files
from nanoladder.config import differences

KINDS = ("tokens", "step", "alone", "without")  # factors of tokens: of the base's, of the row's before, ...
COLORS = {"holds": "tab:green", "costs": "tab:red"}
PANELS = [  # of the picture: the kind of its factors, the colors of verdicts, a title, and what the factors are
    (
        "tokens",
        COLORS,
        "up to each rung: green holds, red costs, gray not significant",
        "the base's tokens ÷ the recipe's",
    ),
    (
        "without",
        {"holds": "tab:orange", "costs": "tab:purple"},
        "left out: orange is missed, purple is not, gray not significant",
        "tokens without the rung ÷ with all",
    ),
]
HOW_TO_READ = f"""\
**tokens ×**: the tokens after which the base, by its curve, has the loss of the recipe up to this rung, divided by
the tokens of the recipe (≥, ≤: a bound). **step ×**: the same, but against the row kept before it. **alone ×**: this
rung on the base. **without ×**: the recipe, against the recipe without this rung. In brackets: simultaneous
{LEVEL:.0%} intervals of a column, over n seeds. Verdicts: on the step; a rung whose learning rate was chosen on
the seeds that judge it (n = 3) is not confirmed. Bits per byte and lr: at length 1, seeds 0 to 2 (together:
at length ½, seed 0); fresh lr: at the row's own length, chosen on seed 0. kept: the rung lowered the mean loss of the
screening, and the rows after stand on it. ms ×: time of a step relative to the base's, alone on the machine,
measured last; gain: tokens × / ms ×."""


def report(protocol, runs, words, on, parameters):
    """Prints and writes what a Protocol found in the runs. words: of the config.

    on: the rungs that the base has, or None. parameters: function of a config.
    """
    folder, trained = runs.path.parent, [run for run in runs if run.row["what"] == "train"]
    if not protocol.base.factor:
        return print(f"the base's learning rate is not known yet; the same command continues\nwritten: {runs.path}")
    rows = figures(protocol, runs, parameters)
    commits, machines = origins(trained)
    text = [
        f"## recipe: `{' '.join(words)}`",
        f"{len(trained)} whole runs of {', '.join(commits)} on {', '.join(machines)}. "
        f"The base has {', '.join(on or ['no rung'])}. Length 1 is {protocol.config.max_steps} steps of "
        f"{protocol.config.batch_size} × {protocol.config.context_length} tokens. {in_words(protocol.curve)}",
        tables.markdown(COLUMNS, rows),
        HOW_TO_READ,
    ]
    results = {
        "config": words,
        "on": on or [],
        "data": runs.conditions["data"],
        "commits": commits,
        "machines": machines,
    }
    results |= {"rows": rows, "curve": protocol.curve and vars(protocol.curve)}
    write(folder, {"recipe.json": json.dumps(results, indent=1), "recipe.md": "\n\n".join(text)})
    if protocol.curve:
        draw(protocol.curve, rows, folder / "recipe.png")
    print(tables.on_terminal(in_words(protocol.curve), COLUMNS, rows))
    print(f"\nwritten: {folder}/recipe.md with all columns, recipe.json, recipe.png and {RUNS}")


def origins(trained: list) -> list[list[str]]:
    """The commits, and the machines, of Runs."""
    return [sorted({run.conditions[key] for run in trained} - {None}) for key in ("commit", "machine")]


def factors(change: Interval) -> dict[str, float]:
    """The factor of tokens, and its interval, of the Interval of a logarithm."""
    return dict(zip(("times", "low", "high"), map(math.exp, change), strict=True))


def in_words(curve):
    if curve is None:
        return "The base's curve is not known yet."
    points = ", ".join(f"{loss:.4f} at {length:g}" for length, loss in sorted(curve.points.items()))
    return f"The base's losses: {points}; as {curve.a:.3f} + {curve.b:.3f} · length^-{curve.c:.3f}."


def figures(protocol, runs, parameters):
    """A dict of figures for each row, the base first. parameters: as in report."""
    trained = next(run.figures for run in runs if (run.figures or {}).get("val_loss"))
    bits_per_nat = trained["val_bpb"] / trained["val_loss"]
    samples = {kind: {} for kind in KINDS}
    last = next((row for row in reversed(protocol.rows) if row.kept), protocol.base)
    for row in protocol.rows:
        pairs = (row, protocol.base), (row, row.below), (protocol.alone.get(row.name), protocol.base)
        for kind, (this, other) in zip(KINDS, (*pairs, (last, protocol.without.get(row.name))), strict=True):
            if this and other and len(gains := protocol.gains(this, other) or ()) >= LEAST:
                samples[kind][row.name] = gains
    changes = {kind: intervals(each) for kind, each in samples.items()}
    rows = []
    for row in [protocol.base, *protocol.rows]:
        cells = {"name": row.name, "note": None if row.factor else row.note or "not screened yet"}
        for kind, each in changes.items():
            if row.name in each:
                cells[kind] = factors(each[row.name]) | {"n": len(samples[kind][row.name])}
        rows.append(cells)
        if "alone" in cells:
            cells["alone"]["bound"] = protocol.bound(protocol.alone[row.name])
        if "without" in cells:
            cells["without"]["bound"] = opposite(protocol.bound(protocol.without[row.name]))
            cells["verdict"] = describe_change(changes["without"][row.name])  # of a rung without a row of its own
        if not row.factor:
            cells["note"] += f": {cells['verdict']}" if "verdict" in cells else ""
            continue
        losses = protocol.screening(row)
        cells |= {"kept": row.kept, "learning_rate": row.factor * row.config.learning_rate, "lr_factor": row.factor}
        if row.fresh_factor:
            cells["fresh_learning_rate"] = row.fresh_factor * row.config.learning_rate
        cells |= {"verdict": verdict(protocol, row, changes["step"]), "length": row.length}
        cells["parameters"] = parameters(row.config)
        if math.inf not in losses:
            cells["loss"] = statistics.fmean(losses)
            cells["bpb"] = cells["loss"] * bits_per_nat
        for kind in ("tokens", "step"):
            if kind in cells:
                cells[kind]["bound"] = protocol.bound(row)
        if screened := protocol.log_gains(row, fresh=False):
            cells["screened"] = [row.tuned_at, row.tuned_at * math.exp(statistics.fmean(screened))]
        if seconds := of_step(runs, row, "time", "seconds"):
            cells["seconds"] = statistics.median(seconds)
            if peaks := of_step(runs, row, "profile", "peak"):
                cells["peak"] = peaks[0]
            cells["ms"] = cells["seconds"] / rows[0]["seconds"]
            cells["gain"] = cells.get("tokens", {"times": 1.0})["times"] / cells["ms"]
    return rows


def of_step(runs, row, what, figure):
    """A figure of the step of a row's config, from each process that measured it."""
    keys = differences(row.config)
    return [run.figures[figure] for run in runs if run.row["what"] == what and run.row["keys"] == keys]


def describe_change(change):
    """Describes the Interval of a change; if it is not significant, with the largest change that it may hide."""
    if change.significant:
        return "holds" if change.middle > 0 else "costs"
    return f"not significant (± {math.expm1(change.high - change.middle):.0%})"


def verdict(protocol, row, steps):
    """Returns the verdict on a rung as text. steps: {row: the Interval of its step}."""
    if row is protocol.base:
        return "the base"
    if diverged := protocol.diverged(row):
        return f"diverges on {diverged} seeds"
    if not protocol.confirmed(row):
        return f"{'kept' if row.kept else 'left out'}, not confirmed"
    step = describe_change(steps[row.name])
    doubt = protocol.bound(row) + opposite(protocol.bound(row.below))
    contradicted = {"holds": "≤", "costs": "≥"}.get(step, "none")
    return "beyond the curve" if contradicted in doubt else step


def opposite(bound):
    """Returns the bound on a quotient whose divisor has this bound."""
    return bound.translate(str.maketrans("≤≥", "≥≤"))


def times(kind):
    return lambda row: tables.factor(row[kind])


COLUMNS = {
    "verdict": lambda row: row["verdict"],
    "tokens ×": times("tokens"),
    "step ×": times("step"),
    "n": lambda row: f"{row['tokens']['n']}",
    "kept": lambda row: "yes" if row["kept"] else "no",
    "alone ×": times("alone"),
    "without ×": times("without"),
    "bits/byte": lambda row: f"{row['bpb']:.4f}",
    "lr": lambda row: f"{row['learning_rate']:.2g}",
    "fresh lr": lambda row: f"{row['fresh_learning_rate']:.2g}",
    "parameters": lambda row: f"{row['parameters'] / 1e6:.2f} M",
    "ms ×": lambda row: f"{row['ms']:.2f}",
    "gain": lambda row: f"{row['gain']:.2f}",
    "tensors GB": tables.gigabytes("peak"),
}


def draw(curve, rows, path):
    """Draws the base's curve, with the losses of the screening on it, and the factors of tokens, to a PNG."""
    from matplotlib.figure import Figure  # loads slowly

    reached = {row["name"]: row for row in rows if "tokens" in row}
    left_out = {f"without {row['name']}": row for row in rows if row["note"] and "without" in row}
    figure = Figure(figsize=(13, 6), layout="constrained")
    columns = figure.add_gridspec(1, 2)
    left = figure.add_subplot(columns[0])
    lengths = [curve.low * (curve.high / curve.low) ** (k / 100) for k in range(101)]
    left.plot(lengths, [curve.loss(length) for length in lengths], color="black", label="the base: its curve")
    left.plot(*zip(*sorted(curve.points.items()), strict=True), "ko", label="and whole runs")
    height, gap = -math.inf, (curve.loss(curve.low) - curve.loss(curve.high)) / 30
    for row in sorted(reached.values(), key=lambda row: -row["screened"][1]):
        loss, color = curve.loss(row["screened"][1]), color_of(row)
        height = max(loss, height + gap)  # labels do not overlap
        left.plot(row["screened"], [loss, loss], color=color, linewidth=1, marker=".")
        leader = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "relpos": (1.0, 0.5), "shrinkA": 0}
        text = {"color": color, "fontsize": 8, "va": "center", "ha": "right", "arrowprops": leader}
        left.annotate(row["name"], (row["screened"][0], loss), (0.8 * row["screened"][0], height), **text)
    left.set(xscale="log", xlabel="length of the run", ylabel="validation loss (nats per token)")
    left.set_title("from a row's run to the base's with the same loss: tokens ×")
    left.set_xticks(ticks := sorted(curve.points), [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    left.legend()
    left.grid(alpha=0.3)
    panels = [(some, *panel) for some, panel in zip((reached, left_out), PANELS, strict=True) if some]
    grid = columns[1].subgridspec(len(panels), 1, height_ratios=[len(some) + 1 for some, *_ in panels])
    for place, panel in enumerate(panels):
        draw_bars(figure.add_subplot(grid[place]), *panel)
    files.write(path, lambda file: figure.savefig(file, dpi=120, format="png"))


def draw_bars(axis, rows, kind, colors, title, label):
    """Draws factors of tokens as bars that begin at 1, no change, with their intervals."""
    for place, row in enumerate(rows.values()):
        axis.barh(place, row[kind]["times"] - 1, left=1.0, color=color_of(row, colors), alpha=0.6)
        axis.plot([row[kind]["low"], row[kind]["high"]], [place, place], color="black", marker="|")
    axis.set_yticks(range(len(rows)), rows)
    axis.invert_yaxis()
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xlabel(f"{label}; {LEVEL:.0%} intervals")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)


def color_of(row, colors=COLORS):
    return colors.get(row["verdict"], "tab:gray")
