"""What each rung is worth, by loss: python profile.py config/recipe_small.py --mode=by_loss [--minutes=60]

The recipe, the trunk of config/recipe (--recipe=NAME: the rungs up to NAME), is trained at several lengths; so is the
recipe without each of its rungs, with each of the others, and the base without any (--rungs=a,b: of the rungs only
these). Every run is whole, with its own schedule. The recipe's losses give a curve over the length; a row's loss, by
this curve, is that of a longer or shorter run of the recipe. The quotient of the lengths is what the rung saves in
tokens, at the loss that the recipe has at the row's length.

1. The recipe's learning rate at LENGTHS, on one seed; the longest takes the one before.
2. Each row's at the shortest length; at the others it differs by as much from the recipe's.
3. All rows at LENGTHS, the shortest first, on three fresh seeds, and the recipe at BETWEEN too.

The next run is a function of the finished ones (protocol.py), so the same command continues.
"""

import dataclasses
import functools
import json
import math
import statistics
import time
from argparse import Namespace

from lab.measure import tables
from lab.measure.results import write
from lab.measure.runs import RUNS
from lab.measure.stats import LEAST, LEVEL, intervals, mean_ratio
from lab.research import recipe
from lab.research.equivalent_tokens import Curve
from lab.research.protocol import FRESH, ONCE, Protocol, Row
from lab.research.recipe_report import factors, origins
from nanoladder import files
from nanoladder.config import parse_arguments
from nanoladder.config.stages import RECIPE_DIR, stage_path, tree
from nanoladder.data import open_dataset
from nanoladder.data.counting import counted_losses
from nanoladder.errors import BadInput
from nanoladder.run import load_config

LENGTHS, BETWEEN = (1 / 16, 1 / 4, 1.0), (1 / 32, 1 / 2, 2.0)  # of a run; the recipe's curve has both
SEEDS = FRESH[:LEAST]
HOW_TO_READ = f"""\
Tokens of a row's run, divided by those that the recipe needs for the loss at which it ends, read off the recipe's
curve (≥, ≤: beyond its end); of a rung added to the recipe, the reverse. Above 1, the rung saves tokens. The headings
have the recipe's own losses. In brackets: simultaneous {LEVEL:.0%} intervals of a column, of rows with {LEAST} seeds
and no bound; lr: at the first length, chosen on another seed."""


class ByLoss(Protocol):
    """Conclusions from the finished runs, and the runs wanted next. rows: recipe, without each, with each, and base.

    only: the rungs that have a row; all if it is empty. top: the last rung of the recipe; the trunk's if there is none.
    """

    def __init__(self, config, rungs, loss, only=(), top=None):
        super().__init__(config, rungs, loss)
        names = stage_path(top) if top else [name for lines, name in tree(RECIPE_DIR) if not lines]
        chosen = [name for name in names if name in self.rungs][1:]
        others = [name for name in [*rungs][1:] if name not in chosen]
        sets = {f"without {name}": [other for other in chosen if other != name] for name in chosen}
        sets |= {f"with {name}": [*chosen, name] for name in others}
        self.recipe = self.row("recipe", chosen)
        wanted = {name: names for name, names in sets.items() if not only or name.partition(" ")[2] in only}
        self.rows = [self.row(name, names) for name, names in wanted.items()] + [self.row("base", [])]

    def row(self, name, rungs):
        """Raises BadInput for rungs that cannot be combined."""
        if isinstance(config := self.config_with(rungs), BadInput):
            raise BadInput(f"--mode=by_loss, {name}: {config}")
        return Row(name, config, self.base, seeds=ONCE)

    def follow(self):
        shortest, *others, _ = LENGTHS
        if not self.tune(self.recipe, shortest, 1.0):
            return self
        self.rates = {shortest: self.recipe.factor}
        for length in others:
            self.rates[length] = self.tune(dataclasses.replace(self.recipe), length, self.recipe.factor)
        factors = [self.tune(row, shortest, self.recipe.factor) for row in self.rows]
        if None in [*factors, *self.rates.values()]:
            return self
        for length in sorted(LENGTHS + BETWEEN):
            for seed in SEEDS:
                for row in [self.recipe, *(self.rows if length in LENGTHS else [])]:
                    self.losses(row, length, [seed], self.factor(row, length))
        self.curve = self.measure_curve()
        return self

    def factor(self, row, length):
        """A row's factor of the learning rate at a length."""
        nearest = max((each for each in self.rates if each <= length), default=min(self.rates))
        return row.factor / self.recipe.factor * self.rates[nearest]

    def of_seeds(self, row, length):
        """{seed: the loss of a row} at a length, of the seeds that have run; infinite if the run diverged."""
        found = {seed: self.losses(row, length, [seed], self.factor(row, length)) for seed in SEEDS}
        return {seed: losses[0] for seed, losses in found.items() if losses}

    def measure_curve(self):
        """The recipe's Curve through its mean losses at the lengths at which all seeds have run; None if few have."""
        known = {length: [*self.of_seeds(self.recipe, length).values()] for length in sorted(LENGTHS + BETWEEN)}
        whole = {length: losses for length, losses in known.items() if len(losses) == len(SEEDS)}
        points = {length: statistics.fmean(losses) for length, losses in whole.items() if max(losses) < math.inf}
        return Curve(points) if len(points) > 1 else None

    def gains(self, row, length):
        """The logarithms of what a row's rung saves at a length, {seed: ...}, and the bound that they are.

        A run that diverged counts as the end of the curve.
        """
        this, recipe = self.of_seeds(row, length), self.of_seeds(self.recipe, length)
        start, sign, result, bound = self.curve.loss(length), -1 if row.name.startswith("with ") else 1, {}, ""
        for seed in [seed for seed in this if recipe.get(seed, math.inf) < math.inf]:
            other = self.curve.length(start + this[seed] - recipe[seed])
            if not 1.0001 * self.curve.low < other < 0.9999 * self.curve.high:
                bound = "≥ " if (other < length) == (sign > 0) else "≤ "
            result[seed] = sign * math.log(length / other)
        return result, bound


def measure(options: Namespace, words: list[str]) -> None:
    """Trains the missing runs for --minutes, and writes the report on all of them."""
    config = load_config(words)
    dataset, rungs, end = open_dataset(config), recipe.rungs_of(config), time.monotonic() + 60 * options.minutes
    top = parse_arguments(words)[1].get("recipe")
    protocol = functools.partial(ByLoss, config, rungs, only=options.rungs or (), top=top)
    protocol(loss=None)  # refuses rungs that cannot be combined
    with recipe.opened("by_loss", options, words) as runs:
        counted = counted_losses(dataset, config)

        def follow():
            return protocol(recipe.losses_in(runs)).follow()

        try:
            recipe.train_wanted(runs, follow, end)
        finally:
            report(follow(), runs, words, dataset, counted)


def report(protocol, runs, words, dataset, counted):
    """Prints and writes what a ByLoss found in the runs.

    counted: {name: loss in nats}, what counting the data reaches on the same windows.
    """
    folder, (factor, unit) = runs.path.parent, dataset.unit
    if not (curve := protocol.curve):
        return print(f"the recipe's curve is not known yet; the same command continues\nwritten: {runs.path}")
    losses = {length: factor * curve.loss(length) for length in LENGTHS if length in curve.points}
    counted = {name: factor * loss for name, loss in counted.items()}
    gains = {length: gains_at(protocol, length) for length in losses}
    texts = {row.name: {} for row in protocol.rows}
    for length, of_rows in gains.items():
        heading = f"{round(length * protocol.config.max_steps):,} steps, {losses[length]:.4f}"
        for name, row in texts.items():
            row[heading] = tables.factor(of_rows[name]) if name in of_rows else ""
    for row in protocol.rows:
        texts[row.name]["lr"] = f"{row.factor * row.config.learning_rate:.2g}"
    trained = [run for run in runs if run.figures]
    commits, machines = map(", ".join, origins(trained))
    known = ", ".join(f"{name} {loss:.4f}" for name, loss in counted.items())
    text = [
        f"## by loss: `{' '.join(words)}`",
        f"{len(trained)} whole runs of {commits} on {machines}. A step is {protocol.config.batch_size} × "
        f"{protocol.config.context_length} tokens. Losses in {unit}. Counted in the training data, on the same windows "
        f"(docs/evaluation.md): {known}.",
        tables.texts(texts),
        HOW_TO_READ,
    ]
    results = {
        "config": words,
        "unit": unit,
        "counted": counted,
        "steps": [round(length * protocol.config.max_steps) for length in losses],
        "losses": [*losses.values()],
        "gains": {name: [of_rows.get(name) for of_rows in gains.values()] for name in texts},
    }
    write(folder, {"by_loss.json": json.dumps(results, indent=1), "by_loss.md": "\n\n".join(text)})
    draw(losses, gains, counted, unit, folder)
    print(tables.texts(texts, tables.plain))
    print(f"\nwritten: {folder}/by_loss.md with all columns, by_loss.json, by_loss.png and {RUNS}")


def gains_at(protocol, length):
    """{row: what its rung saves at a length}: times and a bound; low and high too, unless seeds are few, or bounded.

    Bounds have no spread to judge noise by.
    """
    measured = {row.name: protocol.gains(row, length) for row in protocol.rows}
    samples = {name: [*gains.values()] for name, (gains, _) in measured.items() if gains}
    whole = {name: logs for name, logs in samples.items() if len(logs) >= LEAST and not measured[name][1]}
    known = intervals(whole)
    return {
        name: {"bound": measured[name][1]} | (factors(known[name]) if name in known else {"times": mean_ratio(logs)})
        for name, logs in samples.items()
    }


def draw(losses, gains, counted, unit, folder):
    """Draws what each rung saves over the loss, to by_loss.png. losses: the recipe's, by length. gains: by length."""
    from matplotlib.figure import Figure  # loads slowly

    kinds, rows = {"without": "left out of the recipe", "with": "added to the recipe"}, {}
    for name in next(iter(gains.values())):
        rows.setdefault(name.partition(" ")[0], []).append(name)
    shown = [kind for kind in kinds if kind in rows]
    figure = Figure(figsize=(1 + 6 * len(shown), 6), layout="constrained")
    for axis, kind in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for number, name in enumerate(rows[kind]):
            points = {losses[length]: of_rows[name] for length, of_rows in gains.items() if name in of_rows}
            style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}
            factors_of_tokens = [gain["times"] for gain in points.values()]
            axis.plot([*points], factors_of_tokens, marker="o", label=name.removeprefix(f"{kind} "), **style)
            for loss, gain in points.items():
                if "low" in gain:
                    axis.plot([loss, loss], [gain["low"], gain["high"]], alpha=0.3, **style)
        low, high = axis.get_xlim()
        for name, loss in counted.items():
            if low < loss < high:
                axis.axvline(loss, color="gray", linestyle=":")
                place = {"xycoords": axis.get_xaxis_transform(), "textcoords": "offset points", "xytext": (3, 4)}
                axis.annotate(name, (loss, 0), rotation=90, fontsize=8, color="gray", **place)
        axis.invert_xaxis()
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(title=kinds[kind], xlabel=f"the recipe's loss ({unit})", ylabel="tokens without the rung ÷ with it")
        axis.set(yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))  # beside the lines
        axis.grid(alpha=0.3, which="both")
    files.write(folder / "by_loss.png", lambda file: figure.savefig(file, dpi=120, format="png"))
