"""ArcFace: a margin on the angle."""

from __future__ import annotations

import math

from dsoftmax.losses.criteria.angles import add_angle
from dsoftmax.losses.criteria.base import Entangled, in_range


class ArcFace(Entangled):
    """An additive margin on the angle: φ = cos(θ_y + m2).

    Parameters
    ----------
    m2 : float
        In radians, usually 0.3 to 0.5.
    detach : bool
        Give z_y the gradient of a plain softmax, as insightface's PyTorch code does, instead of
        the true one.

    Examples
    --------
    >>> criterion = ArcFace(scale=64, m2=0.5)
    >>> loss = criterion(z_y, n)
    """

    def __init__(self, scale: float, m2: float = 0.5, detach: bool = False, **kwargs):
        super().__init__(scale, **kwargs)
        self.m2 = float(in_range("m2", m2, 0, math.pi / 2))
        self.detach = detach

    def target(self, F, z_y):
        """φ = cos(θ_y + m2)."""
        if not self.detach:
            return add_angle(F, z_y, self.m2)
        constant = F.BlockGrad(z_y)
        return z_y + (add_angle(F, constant, self.m2) - constant)

    def _describe(self) -> str:
        return f"{super()._describe()}, m2={self.m2:g}{', detach=True' * self.detach}"
