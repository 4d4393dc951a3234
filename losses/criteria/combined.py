"""The combined margin of insightface."""

from __future__ import annotations

import math

from dsoftmax.losses.criteria.angles import add_angle, angle_of
from dsoftmax.losses.criteria.base import Entangled, in_range


class Combined(Entangled):
    """All three margins: φ = cos(m1 θ_y + m2) - m3.

    Parameters
    ----------
    m1, m2, m3 : float
        insightface's are 1, 0.3 and 0.2.

    Examples
    --------
    >>> criterion = Combined(scale=64, m1=1, m2=0.3, m3=0.2)
    >>> loss = criterion(z_y, n)
    """

    def __init__(self, scale: float, m1: float = 1, m2: float = 0.3, m3: float = 0.2, **kwargs):
        super().__init__(scale, **kwargs)
        self.m1 = in_range("m1", m1, 1, 16)
        self.m2 = float(in_range("m2", m2, 0, math.pi / 2))
        self.m3 = m3

    def target(self, F, z_y):
        """φ = cos(m1 θ + m2) - m3."""
        if self.m1 == 1:
            return add_angle(F, z_y, self.m2) - self.m3
        angle = self.m1 * angle_of(F, z_y) + self.m2
        k = F.BlockGrad(F.floor(angle / math.pi))
        sign = 1 - 2 * (k - 2 * F.floor(k / 2))
        return sign * F.cos(angle) - 2 * k - self.m3

    def _describe(self) -> str:
        return f"{super()._describe()}, m1={self.m1:g}, m2={self.m2:g}, m3={self.m3:g}"
