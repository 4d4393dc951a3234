"""Circle loss: each cosine weighs as much as it is far from its optimum."""

from __future__ import annotations

import math

from dsoftmax.losses.criteria.base import BatchContext, Entangled
from dsoftmax.losses.pieces import Piece
from dsoftmax.losses.reductions import LogSumExp


class Circle(Entangled):
    """Circle loss: z_k becomes [z_k + m]₊ (z_k - m), φ = [1 + m - z_y]₊ (z_y - 1 + m).

    The factors in brackets are weights: as in the paper they have no gradient of their own.

    Parameters
    ----------
    m : float
        Usually 0.25, with a scale of 256.

    Examples
    --------
    >>> criterion = Circle(scale=256, m=0.25)
    >>> loss = criterion(z_y, n)
    """

    def __init__(self, scale: float, m: float = 0.25, **kwargs):
        super().__init__(scale, **kwargs)
        self.m = m

    def target(self, F, z_y):
        """φ = [1 + m - z]₊ (z - 1 + m)."""
        return F.relu(1 + self.m - F.BlockGrad(z_y)) * (z_y - 1 + self.m)

    def reduction(self, batch: BatchContext) -> LogSumExp:
        """Return the log-sum-exp of [z + m]₊ (z - m)."""
        m = self.m
        return LogSumExp(Piece(-math.inf, (-m * m, 0.0, 1.0), (m, 1.0), floor=-m))

    def _describe(self) -> str:
        return f"{super()._describe()}, m={self.m:g}"
