"""The worth of a change, in tokens: a curve of losses against tokens, and what so many seeds can tell.

The curve is that of completed schedules, never the middle of one. A loss becomes the length of the base's run that ends
with it; that length by the length of the row's run is the row's *tokens ×*.
"""

import math

import numpy as np

EXPONENTS = np.geomspace(1e-3, 2, 400)  # the smallest is as good as a straight line in the logarithm


class Curve:
    """loss = a + b · length ** -c, the least squares of c on a grid, a and b exact, through {length: mean loss}."""

    def __init__(self, points):
        self.low, self.high = min(points), max(points)
        lengths, losses = np.array(sorted(points)), np.array([points[length] for length in sorted(points)])
        best = math.inf
        for c in EXPONENTS[: None if len(points) > 2 else 1]:
            columns = np.stack([np.ones_like(lengths), lengths**-c], 1)
            (a, b), *_ = np.linalg.lstsq(columns, losses, rcond=None)
            if (error := float(((columns @ (a, b) - losses) ** 2).sum())) < best:
                best, self.a, self.b, self.c = error, float(a), float(b), float(c)

    def loss(self, length):
        return self.a + self.b * length**-self.c

    def length(self, loss):
        """The length of the run that ends with this loss; at most, and at least, one that was measured."""
        if loss <= self.loss(self.high):
            return self.high
        if loss >= self.loss(self.low):
            return self.low
        return ((loss - self.a) / self.b) ** (-1 / self.c)
