"""What a loss is worth in tokens, and what so many seeds can tell.

A base's completed runs of several lengths give a curve. A row's loss becomes the length of the base's run that ends
with it; that length divided by the length of the row's own run is its *tokens ×*, kept as a logarithm for each seed.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

EXPONENTS = np.geomspace(1e-3, 2, 400)  # the smallest is as good as a straight line over the logarithm of the length
LEVEL = 0.95  # of the intervals; a change is seen if its p, by Holm, is below the rest
DRAWS = 20_000


class Curve:
    """loss = a + b · length ** -c: the least squares through {length: mean loss}, of two points with the least c."""

    def __init__(self, points):
        self.points, self.low, self.high = points, min(points), max(points)
        lengths, losses = np.array([*points]), np.array([*points.values()])
        fits = []
        for c in EXPONENTS if len(points) > 2 else EXPONENTS[:1]:
            columns = np.stack([np.ones_like(lengths), lengths**-c], 1)
            (a, b), *_ = np.linalg.lstsq(columns, losses, rcond=None)
            fits.append((float(np.square(columns @ (a, b) - losses).sum()), float(a), float(b), float(c)))
        _, self.a, self.b, self.c = min(fits)

    def loss(self, length):
        return self.a + self.b * length**-self.c

    def length(self, loss):
        """The length of the run that ends with this loss; the least or the largest that was measured, if beyond."""
        if not self.loss(self.high) < loss < self.loss(self.low):
            return self.low if loss > self.loss(1.0) else self.high
        return ((loss - self.a) / self.b) ** (-1 / self.c)


class Estimate(NamedTuple):
    """A factor of tokens, its interval, the number of seeds, and the chance of as large a change by noise alone (Holm).

    resolved: the smallest change, as a share, that would have stood outside the interval.
    """

    times: float
    low: float
    high: float
    n: int
    p: float
    resolved: float

    @property
    def verdict(self):
        if self.p < 1 - LEVEL:
            return "holds" if self.times > 1 else "costs"
        return f"not seen (± {self.resolved:.0%})"


def estimate(samples):
    """{row: Estimate} of {row: [logarithm of a factor, by seed]}, two or more seeds each. Deterministic.

    Five seeds say little about their own spread. So the deviations of all rows are resampled together (Efron &
    Tibshirani 1993), stretched for a row whose own spread is wider. Then Holm (1979) over the rows: of all that holds,
    the chance that any is noise is below 1 - LEVEL.
    """
    if not samples:
        return {}
    random, found = np.random.default_rng(0), {}
    deviations = {name: (np.array(x) - np.mean(x)) * math.sqrt(len(x) / (len(x) - 1)) for name, x in samples.items()}
    pool = np.concatenate([*deviations.values()])
    spread = np.sqrt(np.square(pool).mean()) or 1.0
    for name, logs in samples.items():
        stretch, mean = max(1.0, np.sqrt(np.square(deviations[name]).mean()) / spread), float(np.mean(logs))
        noise = stretch * random.choice(pool, (DRAWS, len(logs))).mean(1)
        below, above = np.quantile(noise, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        p = max(float(np.mean(np.abs(noise) >= abs(mean))), 1 / DRAWS)
        low, high, resolved = math.exp(mean - above), math.exp(mean - below), math.expm1(max(above, -below))
        found[name] = Estimate(math.exp(mean), low, high, len(logs), p, resolved)
    ascending = sorted(found, key=lambda name: found[name].p)
    adjusted = [min(1.0, found[name].p * (len(found) - place)) for place, name in enumerate(ascending)]
    holm = dict(zip(ascending, itertools.accumulate(adjusted, max), strict=True))
    return {name: each._replace(p=holm[name]) for name, each in found.items()}
