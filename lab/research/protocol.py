"""The protocol of --mode=recipe: which runs are wanted next, and what the finished ones show.

Every loss is that of a whole run with its own schedule, at the best learning rate of its row. Rows are compared seed by
seed: runs of one seed train on the same batches. In this order:

1. The base's learning rate: 0.5, 1 and 2 times the config's, on three seeds; further factors of 2 if an end wins.
2. The base at length 1 on ten seeds.
3. Screening: each rung on top of those kept so far, tuned in the same way. It is kept if it lowers the mean loss.
4. The base's curve: half and twice the length, tuned in the same way, and four times the length, once.
5. Confirming, on fresh seeds: every row at the length at which, by the curve, it ends with the base's loss, with the
   learning rate that one other seed chooses there.
6. The recipe without each rung; then each alone, on the base. Their rates are chosen on one seed.

The next run is a function of the finished ones, so an interrupted command, repeated, continues in this order.

With rungs that were kept at another scale, these are not screened, but measured together, tuned at half the length,
then without each, and alone. Rates are chosen on one seed; the base's curve spans a quarter of the length to twice it.
"""

import dataclasses
import math
import statistics
from typing import Any, NamedTuple

from lab.measure.configs import changed
from lab.research.equivalent_tokens import Curve
from nanoladder.config import DEFAULTS, Config
from nanoladder.errors import BadInput

SCREENING, MANY, FRESH, ONCE = (0, 1, 2), tuple(range(10)), (10, 11, 12, 13, 14), (0,)  # seeds
FACTORS = (0.5, 1.0, 2.0)  # of a learning rate
MOST_FACTORS = 6  # with those past an edge
OF_A_RUN = ("out_dir", "init_from", "log_interval", "sample_interval", "wandb")
QUARTER, HALF, TWICE, FOUR = 0.25, 0.5, 2.0, 4.0  # lengths of the base's curve; so is 1


@dataclasses.dataclass
class Row:
    """A config to be measured. below: the row that it is compared with; None: the base.

    seeds, tuned_at: of its screening; factor: of its learning rate, once that is tuned. length: of its runs on fresh
    seeds; fresh_factor: of their learning rate. note: why there are none.
    """

    name: str
    config: object
    below: "Row | None" = None
    seeds: tuple = SCREENING
    tuned_at: float = 1.0
    factor: float | None = None
    length: float | None = None
    fresh_factor: float | None = None
    kept: bool = False
    note: str | None = None


class TrainingRun(NamedTuple):
    """A whole run of a row's config at a multiple of its learning rates and of its steps."""

    name: str
    config: Config
    seed: int
    factor: float = 1.0
    length: float = 1.0

    def resolved(self):
        """The config as trained: one evaluation at the end, no checkpoints."""
        config, steps = self.config, round(self.length * self.config.max_steps)
        values = {key: DEFAULTS[key] for key in OF_A_RUN}
        values |= {key: self.factor * getattr(config, key) for key in ("learning_rate", "min_lr")}
        values |= {"seed": self.seed, "max_steps": steps, "log_interval": steps, "eval_interval": steps}
        values |= {"num_workers": 0, "save_interval": 0}
        if config.lr_decay_steps:
            values["lr_decay_steps"] = round(self.length * config.lr_decay_steps)
        return dataclasses.replace(config, **values)


class Protocol:
    """Conclusions from the finished runs: rows (alone, without: by rung), the curve, the runs wanted next."""

    def __init__(self, config, rungs, loss, kept=()):
        """rungs: {name: changes of the config}, first the base's. loss: function of a run; None: it has not run.

        kept: rungs that are not to be screened, but taken together; none: all are screened.
        """
        self.config, self.rungs, self.loss, self.given = config, rungs, loss, kept
        seeds, self.many = (ONCE, ONCE) if kept else (SCREENING, MANY)
        self.base = Row(next(iter(rungs)), self.config_with([]), seeds=seeds, length=1.0, kept=True)
        self.rows, self.alone, self.without, self.curve, self.wanted = [], {}, {}, None, []

    def follow(self):
        """Goes through the phases as far as the finished runs allow, and lists the wanted ones. Returns itself."""
        if self.tune(self.base, 1.0, 1.0) and self.base_losses(1.0, self.many) is not None:
            screened = self.take_together(self.given) if self.given else self.screen()
            self.curve = self.measure_curve()
            self.base_losses(1.0, FRESH)
            if screened and self.curve:
                self.confirm()
        return self

    def config_with(self, names):
        """The config of the base with these rungs, or the BadInput that explains why there is none."""
        merged = {}
        for name in [next(iter(self.rungs)), *names]:
            merged |= self.rungs[name]
        return changed(self.config, merged)

    def require_valid(self):
        """Raises BadInput unless the base, each rung alone, all up to each and all but each are valid configs."""
        _, *names = self.rungs
        sets = [[], *([name] for name in names), *(names[:n] for n in range(2, len(names) + 1))]
        for each in [*sets, *([other for other in names if other != name] for name in names)]:
            if isinstance(error := self.config_with(each), BadInput):
                raise BadInput(f"--mode=recipe: {' + '.join([self.base.name, *each])}: {error}")

    # -- losses

    def losses(self, row, length, seeds, factor=None) -> Any:
        """Returns a row's losses by seed; None if some are missing, which it then adds to the wanted runs."""
        runs = [TrainingRun(row.name, row.config, seed, factor or row.factor, length) for seed in seeds]
        losses = [self.loss(run) for run in runs]
        missing = [run for run, loss in zip(runs, losses, strict=True) if loss is None]
        self.wanted += [run for run in missing if run not in self.wanted]
        return None if missing else losses

    def base_losses(self, length, seeds, factor=None):
        """The losses of the base. Raises BadInput if one is not finite."""
        losses = self.losses(self.base, length, seeds, factor)
        if losses and math.inf in losses:
            raise BadInput(f"a run of the base at length {length:g} diverged or failed, and all are compared with it")
        return losses

    def screening(self, row):
        """The losses of a row's screening."""
        return self.losses(row, row.tuned_at, row.seeds)

    def tune(self, row, length, center, lowest=math.inf) -> Any:
        """Sets and returns the factor of the learning rate whose worst seed is best; None if runs are missing.

        The mean would choose rates at which two seeds do well and the third does not. lowest: every factor from here to
        the center is tried too, since a rate that beats its half and its double may still be far from the best.
        """
        factors = [center * factor for factor in FACTORS]
        while factors[0] > lowest:
            factors = [factors[0] / 2, *factors]
        while None not in (losses := [self.losses(row, length, row.seeds, factor) for factor in factors]):
            worst = [max(each) for each in losses]
            best = worst.index(min(worst))
            if 0 < best < len(factors) - 1 or len(factors) >= MOST_FACTORS:
                row.factor = factors[best]
                return row.factor
            factors = [factors[0] / 2, *factors] if best == 0 else [*factors, 2 * factors[-1]]

    def log_gains(self, row, fresh) -> Any:
        """The logarithms of a row's tokens × by seed, each against the base's run of its seed; None if any is missing.

        fresh: at the row's own length, on fresh seeds; else from the screening.
        """
        final, screening = (FRESH, row.length, row.fresh_factor), (row.seeds, row.tuned_at, row.factor)
        seeds, length, factor = final if fresh else screening
        if not (factor and length and self.curve):
            return None
        losses, others = self.losses(row, length, seeds, factor), self.base_losses(1.0, seeds)
        if not (losses and others):
            return None
        start = self.curve.loss(1.0)
        pairs = zip(losses, others, strict=True)
        return [math.log(self.curve.length(start + this - other) / length) for this, other in pairs]

    def gains(self, row, below):
        """The logarithms of a row's tokens × over another's by seed, fresh ones if they have run; None if none have."""
        for fresh in (True, False):
            this, other = self.log_gains(row, fresh), self.log_gains(below, fresh)
            if this and other and len(this) == len(other):
                return [a - b for a, b in zip(this, other, strict=True)]

    def confirmed(self, row):
        """True if a row, and the one below, have run on fresh seeds."""
        return bool(self.log_gains(row, fresh=True) and self.log_gains(row.below, fresh=True))

    def bound(self, row):
        """≥ or ≤ if one of a row's runs ends beyond the curve, so that its tokens × are only a bound; else nothing."""
        fresh = self.log_gains(row, fresh=True)
        logs, length = (fresh, row.length) if fresh else (self.log_gains(row, fresh=False), row.tuned_at)
        lengths = [math.exp(log) * length for log in logs]
        if max(lengths) > 0.9999 * self.curve.high:
            return "≥ "
        return "≤ " if min(lengths) < 1.0001 * self.curve.low else ""

    def diverged(self, row):
        """Number of a row's runs at its best learning rate that diverged."""
        of_phases = [self.screening(row), row.fresh_factor and self.losses(row, row.length, FRESH, row.fresh_factor)]
        return sum(losses.count(math.inf) for losses in of_phases if losses)

    # -- the phases

    def screen(self):
        """Adds a row for each rung. True if all are screened."""
        path, below = [], self.base
        for name in [*self.rungs][1:]:
            row = Row(name, self.config_with([*path, name]), below)
            self.rows.append(row)
            if isinstance(row.config, BadInput):  # without a rung that was not kept
                row.note = str(row.config)
                continue
            if not self.tune(row, 1.0, below.factor):
                return False
            row.kept = statistics.fmean(self.screening(row)) < statistics.fmean(self.screening(below))
            if row.kept:
                path, below = [*path, name], row
        return True

    def take_together(self, names):
        """Adds a row for each of these rungs, and one for all of them. True if it is tuned, at half the length."""
        together = Row("together", self.config_with(names), self.base, ONCE, HALF, kept=True)
        self.rows = [*(Row(name, None, kept=True, note="kept at another scale") for name in names), together]
        return bool(self.tune(together, HALF, self.base.factor))

    def measure_curve(self):
        """The base's Curve, by differences from its runs of length 1 of the same seeds; None if runs are missing."""
        many = self.base_losses(1.0, self.many)
        points = {1.0: statistics.fmean(many)}
        for length in (QUARTER, HALF, TWICE) if self.given else (HALF, TWICE, FOUR):
            seeds = ONCE if length == FOUR else self.base.seeds
            if length != FOUR:  # else at the rate of TWICE
                factor = self.tune(dataclasses.replace(self.base), length, self.base.factor)
            losses = factor and self.base_losses(length, seeds, factor)
            pairs = zip(losses or [math.nan], many, strict=False)
            points[length] = losses and points[1.0] + statistics.fmean(this - other for this, other in pairs)
        return None if None in points.values() else Curve(points)

    def confirm(self):
        """Wants the runs on fresh seeds, then each rung alone and the recipe without each rung."""
        self.base.fresh_factor = self.base.factor
        kept = [row for row in self.rows if row.kept]
        names = self.given or [row.name for row in kept]
        for row in sorted((row for row in self.rows if not row.note), key=lambda row: not row.kept):
            self.confirm_row(row)
        for name in self.given or [row.name for row in self.rows]:
            self.alone[name] = alone = Row(f"{name} alone", self.config_with([name]), seeds=ONCE)
            self.tune(alone, 1.0, self.base.factor)
        for alone in self.alone.values():
            self.confirm_row(alone)
        for name in names:
            rest = Row(f"without {name}", self.config_with([other for other in names if other != name]), seeds=ONCE)
            rest.length, rest.factor, self.without[name] = kept[-1].length, kept[-1].fresh_factor, rest
            if isinstance(rest.config, BadInput):
                rest.note = str(rest.config)
            else:
                self.confirm_row(rest, self.base.factor)

    def confirm_row(self, row, lowest: Any = math.inf):
        """Wants a row's runs on fresh seeds. Its length, if it has none, follows from its screening's tokens ×."""
        if row.length is None and (screened := self.log_gains(row, fresh=False)):
            row.length = round(self.config.max_steps / math.exp(statistics.fmean(screened))) / self.config.max_steps
        if row.length and row.factor:
            row.fresh_factor = self.tune(dataclasses.replace(row, seeds=ONCE), row.length, row.factor, lowest)
        self.log_gains(row, fresh=True)
