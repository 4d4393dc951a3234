"""n, the log-sum-exp of the scaled cosines with the negatives, and its gradient.

`NegativeLogSumExp` is n as a Gluon block, to be put into a graph of one's own. `ShardedLogSumExp`
is what the head uses: the same value and gradients by hand, a block of classes at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.gluon import HybridBlock

from dsoftmax.losses.kernels import (
    NOTHING,
    SMALLEST_NORM,
    RowGradient,
    Workspace,
    combine,
    inverse_norm,
    probabilities_of,
    product_over_batch,
    scale_rows,
    weight_gradient,
)

# Classes at a time: few enough for the processor's cache, many enough for fast products.
CACHED_CLASSES = 16384


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


class Found(NamedTuple):
    """What `ShardedLogSumExp` finds for the samples of a batch, over some classes."""

    n: nd.NDArray  # (B,)
    total: nd.NDArray  # (B,), the sum of the logits of the negatives
    largest: nd.NDArray  # (B,), the largest of them
    pull: nd.NDArray | None  # (B, D), the gradient of n to the scaled embedding, if wanted

    def as_in_context(self, context: mx.Context) -> Found:
        """Return a copy on another context, where it is not this one's."""
        return Found(*(value if value is None else value.as_in_context(context) for value in self))


def combine_found(parts: list[Found]) -> Found:
    """Return what is found over all classes from what is found over each part of them."""
    if len(parts) == 1:
        return parts[0]
    n = combine([part.n for part in parts])
    pull = None
    if parts[0].pull is not None:
        pull = nd.add_n(*(scale_rows(part.pull, nd.exp(part.n - n)) for part in parts))
    largest = nd.max(nd.stack(*(part.largest for part in parts), axis=1), axis=1)
    return Found(n, nd.add_n(*(part.total for part in parts)), largest, pull)


class ShardedLogSumExp:
    """n over the classes of one device, and its gradients, by hand.

    Made for one step: `forward`, then `weight_gradient` of each block at most once.

    n is one number a sample, so its gradient to the embedding is one vector a sample, which is
    found on the way forward, where the weights are at hand. The gradient to the weights is
    wanted by the optimizer alone and made when it asks, a block at a time: that of all classes
    never exists at once.

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
        Classes at a time, whose logits are computed anew for the gradient to the weights; None to
        keep the logits of all.
    for_training : bool
        Whether there will be gradients.
    workspace : Workspace
        On the weight's context. It must not be used otherwise until the gradients are taken.
    """

    def __init__(
        self,
        embedding: nd.NDArray,
        weight: nd.NDArray,
        normalize: bool,
        own: np.ndarray,
        offset: nd.NDArray | None,
        chunk: int | None,
        for_training: bool,
        workspace: Workspace,
    ):
        self.embedding = embedding
        self.weight = weight
        self.normalize = normalize
        self.own = own
        self.offset = offset
        self.workspace = workspace
        classes, size = len(weight), chunk or CACHED_CLASSES
        self.blocks = [slice(at, min(at + size, classes)) for at in range(0, classes, size)]
        self.for_training = for_training
        self._keeps = for_training and (chunk is None or len(self.blocks) == 1)
        self._inverses: list[nd.NDArray | None] = []
        self._parts: list[nd.NDArray] = []

    def forward(self) -> Found:
        """Compute n, and its gradient to the embedding."""
        found = None
        for number in range(len(self.blocks)):
            part = self._forward_block(number)
            self._parts.append(part.n)
            found = part if found is None else combine_found([found, part])
        return found

    def _forward_block(self, number: int) -> Found:
        weight = self.weight[self.blocks[number]]
        inverse = None
        if self.normalize:
            # The memory of the gradient, which is made later.
            inverse = inverse_norm(weight, self.workspace.get("gradient", *weight.shape))
        self._inverses.append(inverse)
        _, probabilities, (n, total, largest) = self._compute(number)
        pull = nd.dot(probabilities, weight) if self.for_training else None
        return Found(n, total, largest, pull)

    def weight_gradient(self, number: int, to_n: nd.NDArray, n: nd.NDArray) -> RowGradient:
        """Return the gradient to the weights of a block, in memory the next block's will use.

        Parameters
        ----------
        number : int
            Of ``blocks``.
        to_n : (B,)
            The gradient to n over all devices.
        n : (B,)
            That n.
        """
        weight, inverse = self.weight[self.blocks[number]], self._inverses[number]
        if self._keeps:
            logits = self._buffer("logits", number)
            probabilities = self._buffer("probabilities", number)
        else:
            logits, probabilities, _ = self._compute(number)
        # The probabilities are those within the block; its share of all of n scales the rows, on
        # the (B, D) side of the product, which is the smaller one.
        share = to_n * nd.exp(self._parts[number] - n)
        embedding = scale_rows(self.embedding, share)
        along = None
        if inverse is not None:
            # With ŵ = w / |w| and g the gradient to ŵ, that to w is (g - (g · ŵ) ŵ) / |w|, and
            # g · ŵ is the sum over the batch of share × probability × logit.
            along = product_over_batch(share, logits, probabilities) * inverse
        out = self.workspace.get("gradient", *weight.shape)
        return weight_gradient(probabilities, embedding, weight, along, out)

    def _compute(self, number: int) -> tuple[nd.NDArray, nd.NDArray, tuple]:
        """Return the logits and probabilities of a block, and what `probabilities_of` finds."""
        block = self.blocks[number]
        logits = self._buffer("logits", number)
        nd.dot(self.embedding, self.weight[block], transpose_b=True, out=logits)
        inside = (self.own >= block.start) & (self.own < block.stop)
        own = np.where(inside, self.own - block.start, -1)
        offset = None if self.offset is None else self.offset[:, block]
        probabilities = self._buffer("probabilities", number)
        found = probabilities_of(logits, self._inverses[number], own, offset, probabilities)
        return logits, probabilities, found

    def _buffer(self, name: str, number: int) -> nd.NDArray:
        block = self.blocks[number]
        if self._keeps:
            name = f"{name} {number}"
        return self.workspace.get(name, len(self.embedding), block.stop - block.start)
