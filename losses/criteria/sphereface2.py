"""SphereFace2: a binary classification per class."""

from __future__ import annotations

import math

from dsoftmax.losses.criteria.base import BatchContext, Dissected, softplus
from dsoftmax.losses.pieces import DEGREE, Piece
from dsoftmax.losses.reductions import SoftplusSum


class SphereFace2(Dissected):
    """α softplus(-s (g(z_y) - m) - b) + (1 - α) Σ softplus(s (g(z_k) + m) + b), b learned.

    g(z) = 2 ((z + 1) / 2)^t - 1 spreads the cosines of positives. The paper divides the loss by s,
    which is a matter of the learning rate.

    Parameters
    ----------
    m : float
        Usually 0.4.
    t : int
        1, which makes g the identity, 2 or 3.
    alpha : float
        The weight of the positives; 0.7.
    b : float, optional
        What b is at first; by default such that orthogonal positives and negatives pull equally.

    Examples
    --------
    >>> criterion = SphereFace2(scale=40, m=0.4, b=-20.0)
    >>> loss = criterion(z_y, n, None, mx.nd.array([-20.0]))    # b
    """

    learned = ("b",)

    def __init__(
        self,
        scale: float,
        m: float = 0.4,
        t: int = 3,
        alpha: float = 0.7,
        b: float | None = None,
        **kwargs,
    ):
        super().__init__(scale, **kwargs)
        if t not in range(1, DEGREE + 1):
            raise ValueError(f"t must be 1, 2 or 3, not {t!r}")
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must lie between 0 and 1, not {alpha!r}")
        self.m, self.t, self.alpha = m, t, alpha
        if b is not None:
            self.state["b"] = float(b)

    def spread(self, z):
        """Return g(z)."""
        return 2 * ((z + 1) / 2) ** self.t - 1

    def prepare(self, negatives: int) -> None:
        """Choose b, unless it is known."""
        ratio = self.alpha / ((1 - self.alpha) * max(negatives, 1))
        # With x = e^(b + of_negative): ratio / (1 + x e^-gap) = x / (1 + x), a quadratic equation.
        of_negative, gap = self.scale * (self.spread(0) + self.m), 2 * self.scale * self.m
        root = math.sqrt((1 - ratio) ** 2 + 4 * ratio * math.exp(-gap))
        if ratio < 1:
            log_x = math.log(2 * ratio / (1 - ratio + root))
        else:  # the same number, without the difference of two that are nearly equal
            log_x = math.log((ratio - 1 + root) / 2) + gap
        self.state.setdefault("b", log_x - of_negative)

    def reduction(self, batch: BatchContext) -> SoftplusSum:
        """Return Σ softplus(s (g(z_k) + m) + b)."""
        factors = [math.comb(self.t, power) * 2 ** (1 - self.t) for power in range(self.t + 1)]
        bias = -(self.learned_number("b", batch) + self.scale * self.m)
        spread = Piece.polynomial(-math.inf, factors[0] - 1, *factors[1:])
        return SoftplusSum(bias, spread)

    def intra(self, F, z_y, b):
        """Return α softplus(-s (g(z_y) - m) - b)."""
        positive = self.scale * (self.spread(z_y) - self.m)
        return self.alpha * softplus(F, -F.broadcast_add(positive, b))

    def inter(self, F, z_y, n, b):
        """Return (1 - α) n."""
        return (1 - self.alpha) * n

    def inter_floor(self, n: float) -> float:
        """Return the inter loss of e^n orthogonal negatives."""
        logit = self.scale * (self.spread(0) + self.m) + self.read_number("b")
        return (1 - self.alpha) * math.exp(n) * math.log1p(math.exp(logit))

    def termination_point(self, n: float) -> float:
        """Say at which z_y the intra-class gradient dies away: where g(z_y) = m - b / s."""
        spread = min(max(self.m - self.read_number("b") / self.scale, -1), 1)
        return 2 * ((spread + 1) / 2) ** (1 / self.t) - 1

    def _describe(self) -> str:
        return f"{super()._describe()}, m={self.m:g}, t={self.t}, alpha={self.alpha:g}"
