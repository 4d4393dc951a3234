"""D-Softmax: intra-class and inter-class parts of their own."""

from __future__ import annotations

import math

import mxnet as mx

from dsoftmax.losses.criteria.angles import add_angle
from dsoftmax.losses.criteria.base import BatchContext, Criterion, in_range, softplus


class DSoftmax(Criterion):
    """Dissected softmax: softplus(s (d - z_y)) + softplus(n).

    The paper's ε is e^{s d}, which would overflow; d is where the intra-class gradient ends.

    Parameters
    ----------
    d : float
        Termination point of the intra-class part; the paper's best is 0.9.

    Examples
    --------
    >>> criterion = DSoftmax(scale=32, d=0.9)
    >>> loss = criterion(z_y, n)
    """

    dissected = True

    def __init__(self, scale: float, d: float = 0.9, **kwargs):
        super().__init__(scale, **kwargs)
        self.d = float(d)

    def arguments(self, batch: BatchContext) -> list[mx.nd.NDArray]:
        """Return the weight of the inter part, (1,), where it has one."""
        if batch.inter_weight is None:
            return []
        return [mx.nd.full((1,), batch.inter_weight, ctx=batch.norm.context)]

    def inter(self, F, z_y, n):
        """Return the inter-class loss, (B,); it may look at z_y but sends it no gradient."""
        return softplus(F, n)

    def inter_floor(self, n: float) -> float | None:
        """Return the inter loss of an n."""
        return math.log1p(math.exp(n))

    def parts(self, F, z_y, n, inter_weight=None):
        """Return the intra-class and the inter-class loss, (B,) each."""
        intra = softplus(F, self.scale * (self.d - z_y))
        inter = self.inter(F, F.BlockGrad(z_y), n)
        return intra, inter if inter_weight is None else F.broadcast_mul(inter, inter_weight)

    def termination_point(self, n: float) -> float:
        """Say at which z_y the intra-class gradient dies away: at d, whatever n."""
        return self.d

    def _describe(self) -> str:
        return f"{super()._describe()}, d={self.d:g}"


class Hybrid(DSoftmax):
    """D-Softmax's intra part with the inter part of another loss, which looks at z_y too."""

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
