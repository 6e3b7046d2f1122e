"""Converts a loss into the tokens that the base needs to reach it.

A base's completed runs of several lengths give a curve. A row's loss becomes the length of the base's run that ends
with it; that length divided by the length of the row's own run is its *tokens ×*, kept as a logarithm for each seed.
"""

import numpy as np

EXPONENTS = np.geomspace(1e-3, 2, 400)  # the smallest is as good as a straight line over the logarithm of the length


class Curve:
    """loss = a + b · length ** -c, fitted to {length: mean loss} by least squares; to two points, with the least c."""

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
        """The length of the run that ends with this loss; beyond the curve, its shortest or longest length."""
        if not self.loss(self.high) < loss < self.loss(self.low):
            return self.low if loss > self.loss((self.low * self.high) ** 0.5) else self.high
        return ((loss - self.a) / self.b) ** (-1 / self.c)
