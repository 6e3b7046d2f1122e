"""The one statistic that distinguishes a gain from noise: an interval of paired rounds.

A round measures every version once, close together in time. The difference of two versions within it, of logarithms for
a ratio, is free of the drift that is common to the round. The gain is a trimmed mean of the differences (Tukey &
McLaughlin 1963): without the lowest and the highest or, for ten or more, a fifth at each end, so that one bad round
changes little. A few rounds say little about their own spread, but the rows of a table share a machine: the scale of
the noise is the median spread of all rows, or a row's own if that is wider.

How many scales wide the intervals are is simulated, on tables of as many rows and rounds that gain nothing, with noise
as on a busy machine and as unequal from row to row as in the table. Their width is the one at which, in LEVEL of the
tables, every interval holds the truth: it allows for the number of rows (Westfall & Young 1993).
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

LEVEL = 0.95  # level of simultaneous intervals: the probability that all of a table hold
LOOKED = 0.985  # the level at which they do so although rows are looked at after every round, and left out once narrow
LEAST = 3  # rounds that an interval needs: with two it would span powers of ten
DRAWS = 10_000  # simulated tables
TAILS = 4  # degrees of freedom of the simulated noise, Student's t: occasionally a round is far off
BY_CHANCE = 0.9  # of equally noisy tables look less unequal than this quantile; only what is beyond counts
TINY = 1e-12  # minimum spread, for rounds that are equal
SIDES = ("other", "this")  # two versions that take turns
FIRST_LOOK = 8  # rounds before the first look; before each later one half as many again


class Interval(NamedTuple):
    """A difference and its interval."""

    middle: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        """True if the interval excludes zero, no difference."""
        return self.low > 0 or self.high < 0


def intervals(samples: dict, level: float = LEVEL) -> dict:
    """{name: Interval} of {name: differences by round}, LEAST or more each; they are simultaneous at this level."""
    if not samples:
        return {}
    rows = [np.array(differences) for differences in samples.values()]
    nulls = [simulated(len(rows), len(row)) for row in rows]
    spreads = np.array([spread(row) / null.spread for row, null in zip(rows, nulls, strict=True)]) + TINY
    inequality = simulated(len(rows), min(map(len, rows))).inequality_of(spreads)
    result = {}
    for name, row, null, noise in zip(samples, rows, nulls, scale(spreads), strict=True):
        middle, margin = float(trimmed_mean(row)), float(critical(*null.size, inequality, level) * null.error * noise)
        result[name] = Interval(middle, middle - margin, middle + margin)
    return result


def p_value(differences: list[float]) -> float:
    """The chance that rounds which gain nothing look as good as these, LEAST or more: one-sided, of one row alone."""
    row = np.array(differences)
    null = simulated(1, len(row))
    error = (spread(row) / null.spread + TINY) * null.error
    tail = float((null.gains / null.relative_spreads >= abs(trimmed_mean(row)) / error).mean()) / 2
    return tail if trimmed_mean(row) > 0 else 1 - tail


def trimmed_mean(x, part=5):
    """The mean along the last axis without a fifth, or another part, of the values at each end."""
    n = np.shape(x)[-1]
    cut = trimmed(n, part)
    return np.sort(x)[..., cut : n - cut].mean(-1)


def spread(x):
    """The mean distance from the trimmed mean along the last axis, without as many of the largest as it leaves out.

    With three rounds, none is left out: two that happen to be close would say that there is no noise.
    """
    n = np.shape(x)[-1]
    kept = n - trimmed(n) if n > 3 else n
    return np.sort(abs(x - trimmed_mean(x)[..., None]))[..., :kept].mean(-1)


def trimmed(n, part=5):
    """The number of n values to leave out at each end."""
    return max(n // part, 1) if n > 2 else 0


def scale(spreads):
    """The scale of each row's noise, along the last axis: the median of all rows', or its own if that is wider."""
    return np.maximum(spreads, np.median(spreads, -1, keepdims=True))


class Null:
    """Simulated tables of rows that gain nothing, in units of their noise. size: the rows, and the rounds of each.

    spread: the mean of a row's. error: the standard error of its trimmed mean. gains, relative_spreads: of
    each table's rows, their trimmed means in these errors, and their spreads over `spread`.
    """

    def __init__(self, n_rows, n_rounds):
        random = np.random.default_rng(0)
        noise = random.standard_t(TAILS, (DRAWS, n_rows, n_rounds))
        means, spreads, self.size = trimmed_mean(noise), spread(noise), (n_rows, n_rounds)
        self.spread, self.error = spreads.mean(), math.sqrt(np.square(means).mean())
        self.gains, self.relative_spreads = abs(means) / self.error, spreads / self.spread
        self.factors = random.standard_normal(self.relative_spreads.shape)
        self.by_chance = np.quantile(log_mean_over_median(self.relative_spreads), BY_CHANCE)

    def inequality_of(self, spreads):
        """Estimates how unequal rows' noise is, from their spreads: the standard deviation of its logarithm.

        In tenths, and 0 if chance explains it. The mean of a lognormal exceeds its median by a factor exp(s² / 2).
        """
        return round(math.sqrt(2 * max(0.0, log_mean_over_median(spreads) - self.by_chance)), 1)


simulated = functools.cache(Null)


@functools.cache
def critical(n_rows, n_rounds, inequality, level):
    """The half width of the intervals at a level, in standard errors, in tables whose rows are so unequally noisy."""
    null = simulated(n_rows, n_rounds)
    factors = np.exp(inequality * null.factors)
    return np.quantile((factors * null.gains / scale(factors * null.relative_spreads)).max(1), level)


def log_mean_over_median(spreads):
    """The logarithm of the mean of rows' spreads, along the last axis, over their median."""
    return np.log(spreads.mean(-1) / np.median(spreads, -1))


# -- rounds of two versions, examined before all have been measured


def order(number):
    """The sides in the order in which a round, counted from 1, measures them."""
    return SIDES if number % 2 else SIDES[::-1]


def looks(most):
    """The numbers of rounds, up to `most`, at which the intervals are looked at, and their level.

    All looks share the chance of a false alarm (Bonferroni), so that together they hold at LEVEL.
    """
    numbers, n = [most], FIRST_LOOK
    while n < most:
        numbers.insert(-1, n)
        n += n // 2
    return numbers, 1 - (1 - LEVEL) / len(numbers)


# -- runs on the same seeds


def by_seed(runs: list[dict], name: str, key: str) -> dict:
    """{seed: a figure} of an entry's runs."""
    return {run["seed"]: run[key] for run in runs if run["name"] == name}


def paired(runs: list[dict], a: str, b: str, key: str, change: Callable[[float, float], float]) -> list[float]:
    """Changes from a's figure to b's, seed by seed, for seeds that both have run."""
    first, second = by_seed(runs, a, key), by_seed(runs, b, key)
    return [change(first[seed], second[seed]) for seed in second if seed in first]


def log_ratio(first: float, second: float) -> float:
    return math.log(first / second)


# -- as text


def mean_ratio(logs: list[float]) -> float:
    """The mean ratio of logarithms of ratios, as that of times(); also of too few rounds for an interval."""
    return math.exp(trimmed_mean(np.array(logs)))


def times(interval):
    """Formats the Interval of a logarithm as times as fast: 1.84× (1.81–1.87), else ≈ 1 (0.98–1.03)."""
    middle, low, high = map(math.exp, interval)
    return f"{f'{middle:.2f}×' if interval.significant else '≈ 1'} ({low:.2f}–{high:.2f})"


def in_words(samples: dict) -> dict:
    """{name: times()} of {name: logarithms of ratios, by round}; the mean ratio alone of fewer rounds than LEAST."""
    known = intervals({name: logs for name, logs in samples.items() if len(logs) >= LEAST})
    return {name: times(known[name]) if name in known else f"{mean_ratio(logs):.2f}×" for name, logs in samples.items()}
