"""n, the log-sum-exp of the scaled cosines with the negatives, for your own graphs.

A head computes the same value and gradients by hand, see `negatives`.
"""

from __future__ import annotations

from mxnet.gluon import HybridBlock

from dsoftmax.losses.kernels import NOTHING, SMALLEST_NORM


class NegativeLogSumExp(HybridBlock):
    """n of a batch against the weights of some classes.

    Parameters
    ----------
    scale : float
        The scale s.
    normalize : bool
        Cosines, or plain inner products.

    Inputs:
        - **embedding**: (B, D).
        - **weight**: (C, D), one row per class.
        - **target_row**: (B,), the row of each sample's own class, which is no negative; -1 for
          none.

    Outputs:
        - **n**: (B,); -1e30 for a sample without negatives.

    Examples
    --------
    >>> block = NegativeLogSumExp(scale=32)
    >>> n = block(embedding, weight, target_row)
    """

    def __init__(self, scale: float, normalize: bool = True, **kwargs):
        super().__init__(**kwargs)
        self.scale = scale
        self.normalize = normalize

    def hybrid_forward(self, F, embedding, weight, target_row):
        """Compute n."""
        if self.normalize:
            embedding = F.L2Normalization(embedding, eps=SMALLEST_NORM**2)
            weight = F.L2Normalization(weight, eps=SMALLEST_NORM**2)
        logits = F.dot(self.scale * embedding, weight, transpose_b=True)
        columns = F.expand_dims(F.contrib.arange_like(weight, axis=0), axis=0)
        is_target = F.broadcast_equal(F.expand_dims(F.cast(target_row, "float32"), axis=1), columns)
        logits = F.where(is_target, F.zeros_like(logits) + NOTHING, logits)
        # MXNet has no logsumexp, but log_softmax is x - logsumexp, so that their largest differ
        # by it.
        return F.max(logits, axis=1) - F.max(F.log_softmax(logits, axis=1), axis=1)

    def __repr__(self) -> str:
        kind = "cosines" if self.normalize else "inner products"
        return f"NegativeLogSumExp(of {kind}, scale={self.scale:g})"
