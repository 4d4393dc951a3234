"""MV-Softmax: mis-classified negatives weigh more."""

from __future__ import annotations

import mxnet as mx

from dsoftmax.losses.criteria.base import BatchContext
from dsoftmax.losses.criteria.combined import Combined
from dsoftmax.losses.pieces import Piece
from dsoftmax.losses.reductions import LogSumExp


class MVSoftmax(Combined):
    """A softmax with margins that emphasises hard negatives: z_k > φ becomes t z_k + t - 1.

    φ = cos(θ_y + m2) - m3 is the target, with which a sample is mis-classified as the class of a
    hard negative.

    Parameters
    ----------
    m2, m3 : float
        The margins on the angle and on the cosine: 0 and 0.35 is the paper's MV-AM-Softmax, 0.5 and
        0 its MV-Arc-Softmax.
    t : float
        The emphasis, 1 for none; usually 1.1 to 1.3.

    Examples
    --------
    >>> criterion = MVSoftmax(scale=32, m3=0.35, t=1.2)
    >>> loss = criterion(z_y, n)
    """

    follows_target = True

    def __init__(self, scale: float, m2: float = 0.0, m3: float = 0.35, t: float = 1.2, **kwargs):
        super().__init__(scale, 1, m2, m3, **kwargs)
        self.t = t

    def reduction(self, batch: BatchContext) -> LogSumExp:
        """Return the log-sum-exp with hard negatives emphasised."""
        hard = self.target(mx.nd, batch.z_y)
        return LogSumExp(Piece.polynomial(hard, self.t - 1, self.t))

    def _describe(self) -> str:
        return f"scale={self.scale:g}, m2={self.m2:g}, m3={self.m3:g}, t={self.t:g}"
