"""MagFace: the embedding's length learns to tell the image's quality."""

from __future__ import annotations

import mxnet as mx

from dsoftmax.losses.criteria.angles import add_angles
from dsoftmax.losses.criteria.base import BatchContext, Entangled


class MagFace(Entangled):
    """A margin on the angle that grows with the embedding's length a, and a reward for length.

    φ = cos(θ_y + m(a)), m(a) being linear from l_m at l_a to u_m at u_a; and λ g(a) is added to the
    loss, g(a) = a / u_a² + 1 / a. The length has a gradient, while it is between l_a and u_a.

    Parameters
    ----------
    l_a, u_a : float
        The least and the greatest length, 10 and 110.
    l_m, u_m : float
        The margins there, in radians, 0.45 and 0.8.
    regularizer : float
        λ, usually 20 to 35.

    Examples
    --------
    >>> criterion = MagFace(scale=64)
    >>> loss = criterion(z_y, n, None, mx.nd.array([10.0, 20, 40, 80]))    # a
    """

    def __init__(
        self,
        scale: float,
        l_a: float = 10,
        u_a: float = 110,
        l_m: float = 0.45,
        u_m: float = 0.8,
        regularizer: float = 35,
        **kwargs,
    ):
        super().__init__(scale, **kwargs)
        if not 0 < l_a < u_a:
            raise ValueError(f"l_a must lie between 0 and u_a, not be {l_a!r} with u_a={u_a!r}")
        self.l_a, self.u_a, self.l_m, self.u_m = l_a, u_a, l_m, u_m
        self.regularizer = regularizer

    def arguments(self, batch: BatchContext) -> list[mx.nd.NDArray]:
        """Return the length of each embedding, (B,), with its gradient."""
        return [batch.norm.clip(self.l_a, self.u_a)]

    def target(self, F, z_y, length):
        """φ = cos(θ + m(a))."""
        slope = (self.u_m - self.l_m) / (self.u_a - self.l_a)
        return add_angles(F, z_y, self.l_m + slope * (length - self.l_a))

    def parts(self, F, z_y, n, length):
        """Return the whole loss and 0."""
        loss, nothing = super().parts(F, z_y, n, length)
        return loss + self.regularizer * (length / self.u_a**2 + 1 / length), nothing

    def _describe(self) -> str:
        margins = f"l_m={self.l_m:g}, u_m={self.u_m:g}, regularizer={self.regularizer:g}"
        return f"{super()._describe()}, l_a={self.l_a:g}, u_a={self.u_a:g}, {margins}"
