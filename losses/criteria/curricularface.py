"""CurricularFace: hard negatives weigh more as training goes on."""

from __future__ import annotations

import mxnet as mx

from dsoftmax.losses.criteria.arcface import ArcFace
from dsoftmax.losses.criteria.base import BatchContext
from dsoftmax.losses.pieces import Piece
from dsoftmax.losses.reductions import LogSumExp


class CurricularFace(ArcFace):
    """ArcFace with a curriculum: z_k > cos(θ_y + m2) becomes z_k (t + z_k).

    t is the running mean of z_y: 0 at first, when hard negatives weigh less than easy ones.

    Parameters
    ----------
    m2 : float
        In radians, usually 0.5.
    forget : float
        The part of the running mean that a batch replaces; 0.01.

    Examples
    --------
    >>> criterion = CurricularFace(scale=64, m2=0.5)
    >>> loss = criterion(z_y, n)
    """

    follows_target = True

    def __init__(self, scale: float, m2: float = 0.5, forget: float = 0.01, **kwargs):
        super().__init__(scale, m2, **kwargs)
        self.forget = forget
        self.state = {"t": 0.0}

    def reduction(self, batch: BatchContext) -> LogSumExp:
        """Return the log-sum-exp with hard negatives modulated."""
        self.follow("t", batch.z_y.mean(), self.forget, batch)
        t = self.number("t", batch.z_y.context).astype("float32")
        return LogSumExp(Piece.polynomial(self.target(mx.nd, batch.z_y), 0.0, t, 1.0))
