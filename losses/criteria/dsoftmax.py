"""D-Softmax: intra-class and inter-class parts of their own."""

from __future__ import annotations

import math

from dsoftmax.losses.criteria.angles import add_angle
from dsoftmax.losses.criteria.base import Dissected, in_range, softplus

LEARNED = "learned"


class DSoftmax(Dissected):
    """Dissected softmax: softplus(s (d - z_y)) + softplus(n).

    The paper's ε is e^{s d}, which would overflow; d is where the intra-class gradient ends.

    A learned d is m + b / s with the learned threshold b of UniFace, whose intra-class part this
    is; the inter-class part is softplus(n - b). b begins at log M with M negatives per sample, so
    that d begins where a softmax with the margin m ends.

    Parameters
    ----------
    d : float or "learned"
        Termination point of the intra-class part; the paper's best is 0.9.
    m : float
        Of a learned d: how far positives shall be above the threshold of the negatives.

    Examples
    --------
    >>> criterion = DSoftmax(scale=32, d=0.9)
    >>> loss = criterion(z_y, n)
    """

    def __init__(self, scale: float, d: float | str = 0.9, m: float = 0.4, **kwargs):
        super().__init__(scale, **kwargs)
        self.m = m
        self.d = d if d == LEARNED else _number(d)
        if d == LEARNED:
            self.learned = ("b",)

    def prepare(self, negatives: int) -> None:
        """Choose b, if it is to be learned and not known."""
        if self.learned:
            self.state.setdefault("b", math.log(max(negatives, 1)))

    def intra(self, F, z_y, b=None):
        """Return softplus(s (d - z_y))."""
        if b is None:
            return softplus(F, self.scale * (self.d - z_y))
        return softplus(F, F.broadcast_add(self.scale * (self.m - z_y), b))

    def inter(self, F, z_y, n, b=None):
        """Return softplus(n), or softplus(n - b)."""
        return softplus(F, n if b is None else F.broadcast_sub(n, b))

    def inter_floor(self, n: float) -> float | None:
        """Return the inter loss of an n."""
        b = self.read_number("b") if self.learned else 0.0
        return math.log1p(math.exp(n - b))

    def termination_point(self, n: float) -> float:
        """Say at which z_y the intra-class gradient dies away: at d, whatever n."""
        return self.m + self.read_number("b") / self.scale if self.learned else self.d

    def _describe(self) -> str:
        d = f"learned, m={self.m:g}" if self.learned else f"{self.d:g}"
        return f"{super()._describe()}, d={d}"


def _number(d) -> float:
    try:
        return float(d)
    except (TypeError, ValueError):
        raise ValueError(f"d must be a number like 0.9, or 'learned', not {d!r}") from None


class Hybrid(DSoftmax):
    """D-Softmax's intra part with the inter part of another loss, which looks at z_y too."""

    def __init__(self, scale: float, d: float = 0.9, **kwargs):
        if d == LEARNED:
            raise ValueError(f"d can't be learned by {type(self).__name__}, but by D-Softmax")
        super().__init__(scale, d, **kwargs)

    def inter_floor(self, n: float) -> None:
        """Return None: the inter loss has no floor."""
        return


class DSoftmaxSoftmax(Hybrid):
    """D-Softmax's intra part with the inter gradient of softmax: softplus(n - s stop(z_y)).

    Examples
    --------
    >>> criterion = DSoftmaxSoftmax(scale=32, d=0.9)
    >>> loss = criterion(z_y, n)
    """

    def inter(self, F, z_y, n):
        """Return softmax's loss as a function of n alone."""
        return softplus(F, n - self.scale * z_y)


class DSoftmaxArcFace(Hybrid):
    """D-Softmax's intra part with ArcFace's inter gradient: softplus(n - s cos(stop(θ_y) + m2)).

    Parameters
    ----------
    m2 : float
        In radians, usually 0.5.

    Examples
    --------
    >>> criterion = DSoftmaxArcFace(scale=32, d=0.9, m2=0.5)
    >>> loss = criterion(z_y, n)
    """

    def __init__(self, scale: float, d: float = 0.9, m2: float = 0.5, **kwargs):
        super().__init__(scale, d, **kwargs)
        self.m2 = float(in_range("m2", m2, 0, math.pi / 2))

    def inter(self, F, z_y, n):
        """Return ArcFace's loss as a function of n alone."""
        return softplus(F, n - self.scale * add_angle(F, z_y, self.m2))

    def _describe(self) -> str:
        return f"{super()._describe()}, m2={self.m2:g}"
