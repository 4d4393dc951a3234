"""UniFace: one threshold for all positives and negatives."""

from __future__ import annotations

import math

from dsoftmax.losses.criteria.base import BatchContext, Dissected, softplus
from dsoftmax.losses.reductions import SoftplusSum


class UniFace(Dissected):
    """Unified cross-entropy: softplus(b - s (z_y - m)) + Σ softplus(s z_k - b).

    The threshold b / s, which every positive should exceed and no negative, is learned. The
    intra-class part is D-Softmax's with d = m + b / s.

    Parameters
    ----------
    m : float
        Usually 0.4.
    b : float, optional
        What b is at first; by default log(10 M), with M negatives per sample.

    Examples
    --------
    >>> criterion = UniFace(scale=64, m=0.4, b=13.0)
    >>> loss = criterion(z_y, n, None, mx.nd.array([13.0]))    # b
    """

    learned = ("b",)

    def __init__(self, scale: float, m: float = 0.4, b: float | None = None, **kwargs):
        super().__init__(scale, **kwargs)
        self.m = m
        if b is not None:
            self.state["b"] = float(b)

    def prepare(self, negatives: int) -> None:
        """Choose b, unless it is known."""
        self.state.setdefault("b", math.log(10 * max(negatives, 1)))

    def reduction(self, batch: BatchContext) -> SoftplusSum:
        """Return Σ softplus(s z_k - b)."""
        return SoftplusSum(self.learned_number("b", batch))

    def intra(self, F, z_y, b):
        """Return softplus(b - s (z_y - m))."""
        return softplus(F, F.broadcast_sub(b, self.scale * (z_y - self.m)))

    def inter(self, F, z_y, n, b):
        """Return n."""
        return n

    def inter_floor(self, n: float) -> float:
        """Return the inter loss of e^n orthogonal negatives."""
        return math.exp(n) * math.log1p(math.exp(-self.read_number("b")))

    def termination_point(self, n: float) -> float:
        """Say at which z_y the intra-class gradient dies away: at m + b / s, whatever n."""
        return self.m + self.read_number("b") / self.scale

    def _describe(self) -> str:
        return f"{super()._describe()}, m={self.m:g}"
