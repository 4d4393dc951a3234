"""CosFace: a margin on the cosine."""

from __future__ import annotations

from dsoftmax.losses.criteria.base import Entangled


class CosFace(Entangled):
    """An additive margin on the cosine: φ(z) = z - m3.

    Parameters
    ----------
    m3 : float
        Usually 0.35 to 0.4.

    Examples
    --------
    >>> criterion = CosFace(scale=64, m3=0.35)
    >>> loss = criterion(z_y, n)
    """

    def __init__(self, scale: float, m3: float = 0.35, **kwargs):
        super().__init__(scale, **kwargs)
        self.m3 = m3

    def target(self, F, z_y):
        """φ(z) = z - m3."""
        return z_y - self.m3

    def _describe(self) -> str:
        return f"{super()._describe()}, m3={self.m3:g}"
