"""Measures what each rung of a recipe is worth: python profile.py config/recipe_small.py --mode=recipe [--minutes=60]

The protocol: every loss is that of a whole run with its own schedule, at its own learning rate, and is compared with
that of another run of the same seed, which trains on the same batches. In this order:

1. The base's learning rate: half, once and twice the config's on three seeds, and on, by a factor of 2, past an edge.
2. The base at length 1 on ten seeds.
3. The rungs, each on top of those that held, their rates likewise. A rung holds if every seed gains.
4. The base's curve: half and twice the length, their rates likewise, and once four times the length.
5. Confirming, on fresh seeds: every rung at the length at which, by the curve, it ends with the base's loss.
6. Each rung alone, on the base; then the last row without it.

All of it is a function of the finished trials, which says what to run next (wanted): so it goes on where it was ended.
"""

import dataclasses
import math
import signal
import statistics
import sys
from pathlib import Path

from lab import plan, tables
from lab.predict import costs
from lab.results import ROOT
from lab.trials import Trial, Trials
from lab.worth import Curve
from nanoladder.config import apply
from nanoladder.data import open_dataset
from nanoladder.errors import BadInput

SCREENING, MANY, FRESH, ONCE = (0, 1, 2), tuple(range(10)), (10, 11, 12, 13, 14), (0,)  # seeds
FACTORS = (0.5, 1.0, 2.0)  # of the learning rate
MOST_FACTORS = 6  # an edge is passed so often
SHORT, LONG, LONGEST = 0.5, 2.0, 4.0  # lengths of the base's curve beside 1


@dataclasses.dataclass
class Row:
    """A config that is measured: its learning-rate factor once tuned, the length at which it is confirmed."""

    name: str
    config: object
    factor: float | None = None
    below: "Row | None" = None
    kept: bool = False
    length: float | None = None
    note: str | None = None


class Protocol:
    """What the finished trials say: rows, curve, and the trials to run next."""

    def __init__(self, base, rungs, loss):
        """rungs: {name: changes}, the first of the base. loss: function of a trial, None if it has not run."""
        self.config, self.rungs, self.loss, self.wanted = base, rungs, loss, []
        first, *names = rungs
        self.base, self.rows, self.curve = Row(first, self.built([]), kept=True, length=1.0), [], None
        self.alone, self.without = {}, {}  # rows by the rung's name
        self.base.factor = self.tune(self.base, 1.0, 1.0)
        if self.base.factor is None:
            return
        self.losses(self.base, 1.0, MANY)
        screened, self.curve = self.screen(names), self.measure_curve()
        if screened and self.curve:
            self.confirm()

    def built(self, names):
        """The base with these rungs."""
        changes = {}
        for name in [next(iter(self.rungs)), *names]:
            changes |= self.rungs[name]
        return plan.changed(self.config, changes)

    def losses(self, row, length, seeds, factor=None):
        """The losses of a row, by seed. None if some are missing, which are then wanted."""
        trials = [Trial(row.name, row.config, seed, factor or row.factor, length) for seed in seeds]
        losses = [self.loss(trial) for trial in trials]
        missing = [trial for trial, loss in zip(trials, losses, strict=True) if loss is None]
        self.wanted += [trial for trial in missing if trial not in self.wanted]
        return None if missing else losses

    def tune(self, row, length, center):
        """The factor of the learning rate with the lowest mean loss; None if trials are missing."""
        factors = [center * factor for factor in FACTORS]
        while True:
            losses = [self.losses(row, length, SCREENING, factor) for factor in factors]
            if None in losses:
                return None
            means = [statistics.fmean(each) for each in losses]
            best = means.index(min(means))
            if 0 < best < len(factors) - 1 or len(factors) >= MOST_FACTORS:
                return factors[best]
            factors = [factors[0] / 2, *factors] if best == 0 else [*factors, 2 * factors[-1]]

    def screen(self, names):
        """Adds a row for each rung, on top of those that hold. True if all are known."""
        path, below = [], self.base
        for name in names:
            row = Row(name, self.built([*path, name]), below=below)
            self.rows.append(row)
            if isinstance(row.config, BadInput):
                row.note = str(row.config)
                continue
            row.factor = self.tune(row, 1.0, below.factor)
            if row.factor is None:
                return False
            pairs = zip(self.losses(row, 1.0, SCREENING), self.losses(below, 1.0, SCREENING), strict=True)
            row.kept = all(this < other for this, other in pairs)
            if row.kept:
                path, below = [*path, name], row
        return True

    def measure_curve(self):
        """The base's Curve; None if trials are missing."""
        points, factor = {1.0: self.losses(self.base, 1.0, MANY)}, {}
        for length in (SHORT, LONG):
            factor[length] = self.tune(self.base, length, self.base.factor)
            points[length] = factor[length] and self.losses(self.base, length, SCREENING, factor[length])
        points[LONGEST] = factor[LONG] and self.losses(self.base, LONGEST, ONCE, factor[LONG])
        if None in points.values():
            return None
        return Curve({length: statistics.fmean(losses) for length, losses in points.items()})

    def worth(self, row, length, seeds):
        """The logarithms of a row's tokens ×, by seed, each beside the base's run of that seed; None if some miss."""
        losses, others = self.losses(row, length, seeds), self.losses(self.base, 1.0, seeds)
        if not (losses and others):
            return None
        start = self.curve.loss(1.0)
        pairs = zip(losses, others, strict=True)
        return [math.log(self.curve.length(start + this - other) / length) for this, other in pairs]

    def confirm(self):
        """Wants what comes after the screening and the curve."""
        self.losses(self.base, 1.0, FRESH)
        kept = [row for row in self.rows if row.kept]
        for row in [*kept, *(row for row in self.rows if not row.kept)]:
            self.confirm_row(row)
        for row in self.rows:
            self.alone[row.name] = alone = Row(row.name, self.built([row.name]), below=self.base)
            alone.factor = self.tune(alone, 1.0, self.base.factor)
            self.confirm_row(alone)
        for row in kept:
            others = [other.name for other in kept if other is not row]
            self.without[row.name] = rest = Row(row.name, self.built(others), below=kept[-1], length=kept[-1].length)
            if not isinstance(rest.config, BadInput):
                rest.factor = self.tune(rest, rest.length, kept[-1].factor)
                self.confirm_row(rest)

    def confirm_row(self, row):
        """Wants the trials on fresh seeds at the length at which, by its screening, a row ends with the base's loss."""
        if row.factor:
            times = math.exp(statistics.fmean(self.worth(row, 1.0, SCREENING))) if row.length is None else 1.0
            row.length = row.length or round(self.config.max_steps / times) / self.config.max_steps
            self.losses(row, row.length, FRESH)


def measure(options, words, default_folder):
    """Runs the trials that are missing, for --minutes; prints and writes what all of them say."""
    base = plan.load_config(words)
    rungs = rungs_of(base)
    if not rungs:
        raise BadInput("--mode=recipe: config/recipe has no rungs")
    dataset = open_dataset(base)
    require_valid(base, rungs)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the children, as Ctrl-C does

    def parameters(config):
        return costs(dataclasses.replace(config, vocab_size=dataset.vocab_size))["n_params"]

    with Trials(Path(options.out_dir or default_folder()), dataset.fingerprint()) as trials:
        trials.run(lambda: Protocol(base, rungs, trials.loss).wanted, parameters, options.minutes)
        print(table(Protocol(base, rungs, trials.loss)))
        print(f"written: {trials.path}")


def rungs_of(config):
    """{name: changes of the config} of the files in config/recipe, in order."""
    values, rungs = vars(config), {}
    for path in sorted(Path(ROOT, "config", "recipe").glob("[0-9][0-9]_*.py")):
        after = apply([path], {}, values)
        rungs[path.stem.partition("_")[2]] = {key: after[key] for key in after if after[key] != values[key]}
        values = after
    return rungs


def require_valid(config, rungs):
    """Raises BadInput unless the base, each rung alone, all up to each, and all but each are valid."""
    first, *names = rungs
    combinations = [[], *([name] for name in names), *(names[: n + 1] for n in range(len(names)))]
    combinations += [[other for other in names if other != name] for name in names]
    for combination in combinations:
        merged = {key: value for name in [first, *combination] for key, value in rungs[name].items()}
        if isinstance(error := plan.changed(config, merged), BadInput):
            raise BadInput(f"--mode=recipe, {' + '.join([first, *combination])}: {error}")


def table(found):
    """The rows in Markdown."""
    if not found.base.factor:
        return "the learning rate of the base is not known yet; more --minutes continue"
    rows = []
    for row in [found.base, *found.rows]:
        losses = row.factor and found.losses(row, 1.0, SCREENING)
        cells = {"name": row.name, "note": row.note or (None if losses else "not known yet")}
        if losses:
            cells |= {"loss": statistics.fmean(losses), "factor": row.factor, "kept": row.kept}
            if found.curve:
                cells["times"] = math.exp(statistics.fmean(found.worth(row, 1.0, SCREENING)))
        rows.append(cells)
    columns = {
        "tokens ×": lambda row: f"{row['times']:.2f}",
        "loss": lambda row: f"{row['loss']:.4f}",
        "lr factor": lambda row: f"{row['factor']:g}",
        "holds": lambda row: "yes" if row["kept"] else "no",
    }
    return tables.markdown(columns, rows)
