"""n, the log-sum-exp of the scaled cosines with the negatives, and its gradient.

`NegativeLogSumExp` is n as a Gluon block, to be put into a graph of one's own. `ShardedLogSumExp`
is what the head uses: the same value and gradient by hand, a chunk of classes at a time, so that
no array of batch × classes is needed.
"""

from __future__ import annotations

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


def inverse_norm(vectors: nd.NDArray) -> nd.NDArray:
    """Return 1 / length of each row, (n, 1); 0 for a row of zeros, which has no direction."""
    ones = nd.ones((vectors.shape[1], 1), ctx=vectors.context)
    squared = nd.dot(nd.square(vectors), ones)
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


class ShardedLogSumExp:
    """n over the classes of one device, and the gradient of it, by hand.

    Made for one step: `forward`, then `backward` at most once.

    Parameters
    ----------
    embedding : (B, D)
        Normalised, if cosines are wanted, and multiplied by the scale.
    weight : (C, D)
        The classes' weights, as they are stored.
    inverse : (C, 1) or None
        One over the weights' lengths; None for inner products.
    own : (B,) int64, numpy
        The row of each sample's own class in `weight`; -1 for none.
    offset : (1, C) or None
        To be added to the logits.
    chunk : int or None
        Classes at a time; None for all at once.
    keep : bool
        Whether a backward pass will come: without chunks the probabilities are kept for it.
    """

    def __init__(self, embedding, weight, inverse, own, offset=None, chunk=None, keep=True):
        self.embedding = embedding
        self.weight = weight
        self.inverse = inverse
        self.own = own
        self.offset = offset
        classes = len(weight)
        chunk = chunk or classes
        self.chunks = [slice(at, min(at + chunk, classes)) for at in range(0, classes, chunk)]
        self.keep = keep and len(self.chunks) == 1
        self._probabilities = None
        self._parts: list[nd.NDArray] = []

    def forward(self) -> tuple[nd.NDArray, nd.NDArray, nd.NDArray]:
        """Compute n, and the sum and the largest of the scaled cosines, over the negatives.

        Returns
        -------
        n, total, largest : (B,) each
        """
        totals, largests = [], []
        for chunk in self.chunks:
            logits, own, total = self._logits(chunk)
            largests.append(_row_max(logits))
            self._add_offset(logits, chunk)
            reference = nd.array((own == 0).astype("float32"), ctx=logits.context)
            if logits.shape[1] == 1:
                part = logits.reshape(-1).copy()
            else:
                # logsumexp = x - log_softmax(x) at any column but the own one, whose -1e30 would
                # swallow it.
                part = nd.pick(logits, reference) - nd.pick(nd.log_softmax(logits), reference)
            self._parts.append(part)
            totals.append(total)
            if self.keep:
                self._probabilities = nd.softmax(logits, out=logits)
        n = combine(self._parts)
        return n, sum(totals[1:], totals[0]), nd.max(nd.stack(*largests, axis=1), axis=1)

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
        for chunk, part in zip(self.chunks, self._parts):
            probabilities = self._probabilities
            if probabilities is None:
                logits, _, _ = self._logits(chunk)
                self._add_offset(logits, chunk)
                probabilities = nd.softmax(logits, out=logits)
            # The probabilities are of this chunk; its share of all of n scales the rows. It scales
            # the (B, D) side of the products, not the probabilities.
            rows = (gradient * nd.exp(part - n)).expand_dims(1)
            weight, target = self.weight[chunk], out[chunk]
            nd.dot(probabilities, rows * self.embedding, transpose_a=True, out=target)
            if self.inverse is not None:
                inverse = self.inverse[chunk]
                project(target, weight, inverse)
                nd.broadcast_mul(probabilities, inverse.reshape((1, -1)), out=probabilities)
            to_embedding += nd.dot(probabilities, weight) * rows
        return to_embedding

    def _logits(self, chunk: slice):
        """Return the chunk's logits with the own classes masked, those, and the unmasked sum."""
        logits = nd.dot(self.embedding, self.weight[chunk], transpose_b=True)
        if self.inverse is not None:
            nd.broadcast_mul(logits, self.inverse[chunk].reshape((1, -1)), out=logits)
        own = self.own - chunk.start
        own[(own < 0) | (own >= logits.shape[1])] = -1
        rows = (own >= 0).nonzero()[0]
        total = nd.dot(logits, nd.ones((logits.shape[1], 1), ctx=logits.context)).reshape(-1)
        if len(rows):
            places = nd.array([rows, own[rows]], ctx=logits.context, dtype="int32")
            masked = nd.gather_nd(logits, places)
            at = nd.array(rows, ctx=logits.context, dtype="int32").reshape((1, -1))
            total = total - nd.scatter_nd(masked, at, shape=total.shape)
            nothing = nd.full((len(rows),), NOTHING, ctx=logits.context)
            nd._internal._scatter_set_nd(logits, nothing, places, shape=logits.shape, out=logits)
        return logits, own, total

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
