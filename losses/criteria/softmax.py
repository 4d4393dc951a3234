"""Softmax without a margin."""

from __future__ import annotations

from dsoftmax.losses.criteria.base import Entangled


class Softmax(Entangled):
    """Softmax: on cosines NormFace's, on inner products (with scale 1) the plain one.

    Examples
    --------
    >>> criterion = Softmax(scale=32)
    >>> loss = criterion(z_y, n)
    """

    def target(self, F, z_y):
        """φ(z) = z."""
        return z_y
