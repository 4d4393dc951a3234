"""n, the log-sum-exp of the scaled cosines with the negatives, and its gradient.

`NegativeLogSumExp` is n as a Gluon block, to be put into a graph of one's own. `ShardedLogSumExp`
is what the head uses: the same value and gradient by hand, a chunk of classes at a time, so that
no array of batch × classes is needed.
"""

from __future__ import annotations

import math

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.gluon import HybridBlock

# Stands for the logarithm of an empty sum. Finite, so that no difference of two is NaN.
NOTHING = -1e30
SMALLEST_NORM = 1e-10


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
        - **weight**: (C, D), a row a class.
        - **own**: (B,), the row of each sample's own class, which is no negative; -1 for none.

    Outputs:
        - **n**: (B,); -1e30 for a sample without negatives.

    Examples
    --------
    >>> block = NegativeLogSumExp(scale=32)
    >>> n = block(embedding, weight, own)
    """

    def __init__(self, scale: float, normalize: bool = True, **kwargs):
        super().__init__(**kwargs)
        self.scale = scale
        self.normalize = normalize

    def hybrid_forward(self, F, embedding, weight, own):
        """Compute n."""
        if self.normalize:
            embedding = F.L2Normalization(embedding, eps=SMALLEST_NORM**2)
            weight = F.L2Normalization(weight, eps=SMALLEST_NORM**2)
        logits = F.dot(self.scale * embedding, weight, transpose_b=True)
        columns = F.expand_dims(F.contrib.arange_like(weight, axis=0), axis=0)
        is_own = F.broadcast_equal(F.expand_dims(F.cast(own, "float32"), axis=1), columns)
        logits = F.where(is_own, F.zeros_like(logits) + NOTHING, logits)
        # MXNet has no logsumexp, but log_softmax is x - logsumexp, so that their largest differ
        # by it.
        return F.max(logits, axis=1) - F.max(F.log_softmax(logits, axis=1), axis=1)

    def __repr__(self) -> str:
        kind = "cosines" if self.normalize else "inner products"
        return f"NegativeLogSumExp(of {kind}, scale={self.scale:g})"


def combine(parts: list[nd.NDArray]) -> nd.NDArray:
    """Return the log-sum-exp of several log-sum-exps, arrays (B,) on one context."""
    if len(parts) == 1:
        return parts[0]
    stacked = nd.stack(*parts, axis=1)
    largest = nd.max(stacked, axis=1, keepdims=True)
    return (largest + nd.log(nd.sum(nd.exp(stacked - largest), axis=1, keepdims=True))).reshape(-1)


def inverse_norm(vectors: nd.NDArray, scratch: nd.NDArray | None = None) -> nd.NDArray:
    """Return 1 / length of each row, (n, 1); 0 for a row of zeros, which has no direction.

    `scratch` may be memory of the vectors' shape to work in.
    """
    ones = nd.ones((vectors.shape[1], 1), ctx=vectors.context)
    squared = nd.dot(nd.square(vectors, out=scratch), ones)
    return (squared > SMALLEST_NORM**2) * nd.rsqrt(nd.maximum(squared, SMALLEST_NORM**2))


def project(gradient: nd.NDArray, vectors: nd.NDArray, inverse: nd.NDArray) -> nd.NDArray:
    """Carry a gradient to the normalised rows over to the rows themselves, in place.

    Parameters
    ----------
    gradient : (n, D)
        To ``vectors * inverse``; it is overwritten.
    vectors : (n, D)
    inverse : (n, 1)
        Of `inverse_norm`.
    """
    ones = nd.ones((vectors.shape[1], 1), ctx=vectors.context)
    along = nd.dot(gradient * vectors, ones) * nd.square(inverse)
    gradient -= nd.broadcast_mul(vectors, along)
    return nd.broadcast_mul(gradient, inverse, out=gradient)


class Workspace:
    """Memory that step after step uses again: fresh pages cost more than the arithmetic on them."""

    def __init__(self, context: mx.Context):
        self.context = context
        self._buffers: dict[str, nd.NDArray] = {}

    def get(self, name: str, *shape: int) -> nd.NDArray:
        """Return an array of this shape, with any content, in the memory of this name."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = nd.empty((size,), ctx=self.context)
        return self._buffers[name][:size].reshape(shape)


class ShardedLogSumExp:
    """n over the classes of one device, and the gradient of it, by hand.

    Made for one step: `forward`, then `backward` at most once.

    Parameters
    ----------
    embedding : (B, D)
        Normalised, if cosines are wanted, and multiplied by the scale.
    weight : (C, D)
        The classes' weights, as they are stored.
    normalize : bool
        Cosines, or plain inner products.
    own : (B,) int64, numpy
        The row of each sample's own class in `weight`; -1 for none.
    offset : (1, C) or None
        To be added to the logits.
    chunk : int or None
        Classes at a time; None for all at once.
    workspace : Workspace
        On the weight's context. It must not be used otherwise until `backward` is done.
    """

    def __init__(self, embedding, weight, normalize, own, offset, chunk, workspace):
        self.embedding = embedding
        self.weight = weight
        self.normalize = normalize
        self.own = own
        self.offset = offset
        self.workspace = workspace
        classes = len(weight)
        chunk = chunk or classes
        self.chunks = [slice(at, min(at + chunk, classes)) for at in range(0, classes, chunk)]
        self._inverses: list[nd.NDArray | None] = []
        self._parts: list[nd.NDArray] = []

    def forward(self) -> tuple[nd.NDArray, nd.NDArray, nd.NDArray]:
        """Compute n, and the sum and the largest of the scaled cosines, over the negatives.

        Returns
        -------
        n, total, largest : (B,) each
        """
        totals, largests = [], []
        for chunk in self.chunks:
            self._inverses.append(self._inverse_of(chunk))
            logits = self._logits(chunk, self._inverses[-1])
            own = self._own_in(chunk)
            totals.append(self._mask(logits, own))
            largests.append(_row_max(logits))
            self._add_offset(logits, chunk)
            if logits.shape[1] == 1:
                self._parts.append(logits.reshape(-1).copy())
            else:
                # logsumexp = x - log_softmax(x) at any column but the own one, whose -1e30 would
                # swallow it.
                logs = nd.log_softmax(logits, out=self._probabilities_for(logits))
                column = nd.array(own == 0, ctx=logits.context, dtype="float32")
                self._parts.append(nd.pick(logits, column) - nd.pick(logs, column))
        n = combine(self._parts)
        return n, nd.add_n(*totals), nd.max(nd.stack(*largests, axis=1), axis=1)

    def backward(self, gradient: nd.NDArray, n: nd.NDArray, out: nd.NDArray) -> nd.NDArray:
        """Send the gradient to n back.

        Parameters
        ----------
        gradient : (B,)
            To n over all devices.
        n : (B,)
            That n.
        out : (C, D)
            Where the gradient to the weights is written.

        Returns
        -------
        (B, D)
            The gradient to the embedding.
        """
        to_embedding = nd.zeros_like(self.embedding)
        for chunk, part, inverse in zip(self.chunks, self._parts, self._inverses):
            logits = self._logits_again(chunk, inverse)
            probabilities = nd.softmax(logits, out=self._probabilities_for(logits))
            # They are the probabilities within this chunk; its share of all of n scales the rows.
            # It scales the (B, D) side of the products, which is the smaller one.
            share = gradient * nd.exp(part - n)
            rows = share.expand_dims(1)
            weight, target = self.weight[chunk], out[chunk]
            if inverse is None:
                nd.dot(probabilities, rows * self.embedding, transpose_a=True, out=target)
            else:
                # With ŵ = w / |w| and g the gradient to ŵ, that to w is (g - (g · ŵ) ŵ) / |w|.
                # g · ŵ is the sum over the batch of share × probability × logit.
                along = self._sum_over_batch(share, probabilities, logits, chunk)
                nd.broadcast_mul(probabilities, inverse.reshape((1, -1)), out=probabilities)
                nd.dot(probabilities, rows * self.embedding, transpose_a=True, out=target)
                scratch = self.workspace.get("scratch", *weight.shape)
                nd.broadcast_mul(weight, along * nd.square(inverse), out=scratch)
                nd.elemwise_sub(target, scratch, out=target)
            to_embedding += nd.dot(probabilities, weight) * rows
        return to_embedding

    def _inverse_of(self, chunk: slice) -> nd.NDArray | None:
        if not self.normalize:
            return None
        weight = self.weight[chunk]
        return inverse_norm(weight, self.workspace.get("scratch", *weight.shape))

    def _logits(self, chunk: slice, inverse: nd.NDArray | None) -> nd.NDArray:
        """Multiply the batch with a chunk of the weights, (B, classes)."""
        weight = self.weight[chunk]
        logits = self.workspace.get("logits", len(self.embedding), len(weight))
        nd.dot(self.embedding, weight, transpose_b=True, out=logits)
        if inverse is not None:
            nd.broadcast_mul(logits, inverse.reshape((1, -1)), out=logits)
        return logits

    def _logits_again(self, chunk: slice, inverse: nd.NDArray | None) -> nd.NDArray:
        """Return the logits as `forward` left them: they are still there if it was one chunk."""
        if len(self.chunks) == 1:
            return self.workspace.get("logits", len(self.embedding), len(self.weight))
        logits = self._logits(chunk, inverse)
        self._mask(logits, self._own_in(chunk))
        self._add_offset(logits, chunk)
        return logits

    def _probabilities_for(self, logits: nd.NDArray) -> nd.NDArray:
        return self.workspace.get("probabilities", *logits.shape)

    def _sum_over_batch(self, share, probabilities, logits, chunk: slice) -> nd.NDArray:
        """Return Σ_i share_i p_ik z_ik, (classes, 1); the logits are overwritten."""
        if self.offset is not None:
            nd.broadcast_sub(logits, self.offset[:, chunk], out=logits)
        nd.elemwise_mul(logits, probabilities, out=logits)
        return nd.dot(share.reshape((1, -1)), logits).reshape((-1, 1))

    def _own_in(self, chunk: slice) -> np.ndarray:
        own = self.own - chunk.start
        return np.where((own >= 0) & (own < chunk.stop - chunk.start), own, -1)

    def _mask(self, logits: nd.NDArray, own: np.ndarray) -> nd.NDArray:
        """Mask the own classes; return the sum of the other logits, (B,)."""
        ones = nd.ones((logits.shape[1], 1), ctx=logits.context)
        total = nd.dot(logits, ones).reshape(-1)
        rows = np.flatnonzero(own >= 0)
        if len(rows):
            places = nd.array([rows, own[rows]], ctx=logits.context, dtype="int32")
            masked = nd.gather_nd(logits, places)
            total = total - nd.scatter_nd(masked, places[:1], shape=total.shape)
            nothing = nd.full((len(rows),), NOTHING, ctx=logits.context)
            nd._internal._scatter_set_nd(logits, nothing, places, shape=logits.shape, out=logits)
        return total

    def _add_offset(self, logits: nd.NDArray, chunk: slice) -> None:
        if self.offset is not None:
            nd.broadcast_add(logits, self.offset[:, chunk], out=logits)


def _row_max(matrix: nd.NDArray) -> nd.NDArray:
    """Return the largest of each row, (B,): by max pooling, which is five times as fast as max."""
    pooled = nd.Pooling(
        matrix.reshape((1, matrix.shape[0], matrix.shape[1])),
        global_pool=True,
        pool_type="max",
        kernel=(1,),
    )
    return pooled.reshape(-1)
