"""n, a sum over the negatives of each sample, and its gradients by hand, block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import nd

from dsoftmax.losses import operators
from dsoftmax.losses.kernels import (
    RowGradient,
    Workspace,
    inverse_norm,
    product_over_batch,
    scale_rows,
)
from dsoftmax.losses.reductions import Reduction
from dsoftmax.recognition.common.products import Product, times_transposed, transposed_times

if TYPE_CHECKING:
    from dsoftmax.losses.step import StepInputs

# Classes per block: few enough for the processor's cache, many enough for fast products.
CACHED_CLASSES = 16384
# MXNet's operators sweep over a block many times: it must stay in a cache that is nearer.
OFTEN_SWEPT_CLASSES = 2048


class NegativeSums(NamedTuple):
    """Sums over each sample's negatives among some classes."""

    n: nd.NDArray  # (B,)
    logit_sum: nd.NDArray  # (B,), the sum of the negatives' logits
    logit_max: nd.NDArray  # (B,), the largest of them
    mass: nd.NDArray | None = None  # (B,), minus the slope of n to the bias, if it has one
    grad_embedding: nd.NDArray | None = None  # (B, D), the gradient of n to the scaled embedding

    @property
    def numbers(self) -> list[nd.NDArray]:
        """The sums that are one number per sample, (B,) each."""
        return [value for value in self[:4] if value is not None]

    def as_in_context(self, context: mx.Context) -> NegativeSums:
        """Return a copy on another context, or this one if it is there already."""
        return NegativeSums(
            *(value if value is None else value.as_in_context(context) for value in self)
        )


def combine_negatives(parts: list[NegativeSums], reduction: Reduction) -> NegativeSums:
    """Combine the sums over parts of the classes into those over all of them."""
    if len(parts) == 1:
        return parts[0]
    n = reduction.combine([part.n for part in parts])
    mass = grad_embedding = None
    if parts[0].mass is not None:
        mass = nd.add_n(*(part.mass for part in parts))
    if parts[0].grad_embedding is not None:
        grad_embedding = nd.add_n(
            *(scale_rows(part.grad_embedding, reduction.share(part.n, n)) for part in parts)
        )
    logit_sum = nd.add_n(*(part.logit_sum for part in parts))
    logit_max = nd.max(nd.stack(*(part.logit_max for part in parts), axis=1), axis=1)
    return NegativeSums(n, logit_sum, logit_max, mass, grad_embedding)


class BlockwiseNegatives:
    """n over the classes of one shard, and its gradients, by hand.

    Made for one step: `forward`, then `weight_gradient` of each block at most once. Without
    `forward`, or with more classes than a chunk, `weight_gradient` computes the logits again.

    n is one number per sample, so its gradient to the embedding is one vector per sample, which the
    forward pass computes while the weights are in the cache. The gradient to the weights is made
    block by block when the optimizer asks for it, so that the gradient to all class weights never
    exists at once.

    Parameters
    ----------
    embedding : (B, D)
        Normalised for cosines, and multiplied by the scale.
    weight : (C, D)
        The class weights, as they are stored.
    inverses : dict of int to (classes, 1)
        1 / length of the weights of some blocks; others are added.
    target_column : (B,) int64, numpy
        The first row of each sample's own class in `weight`; -1 for none.
    offset : (1, classes) or None
        To be added to the logits.
    reduction : Reduction
        Makes n of the logits; bound to them.
    inputs : StepInputs
        Says whether to normalise, how many classes to take per block, whether gradients will be
        needed and whether logits may be kept for those to the weights.
    workspace : Workspace
        On the weight's context.
    """

    def __init__(
        self,
        embedding: nd.NDArray,
        weight: nd.NDArray,
        inverses: dict[int, nd.NDArray],
        target_column: np.ndarray,
        offset: nd.NDArray | None,
        reduction: Reduction,
        inputs: StepInputs,
        workspace: Workspace,
    ):
        self._embedding = embedding
        self._weight = weight
        self._inverses = inverses
        self._target_column = target_column
        self._offset = offset
        self._reduction = reduction
        self._inputs = inputs
        self._workspace = workspace
        rows, centres = len(weight), inputs.subcentres
        at_once = inputs.chunk or _classes_per_block(rows, weight.context)
        size = max(at_once // centres, 1) * centres
        self.blocks = [slice(at, min(at + size, rows)) for at in range(0, rows, size)]
        is_whole = inputs.chunk is None or len(self.blocks) == 1
        self._keeps_logits = inputs.for_training and inputs.keeps_logits and is_whole
        self._block_n: list[nd.NDArray] = []  # of blocks whose logits are kept

    def forward(self) -> NegativeSums:
        """Compute n and, for training, its gradient to the embedding."""
        negatives = None
        for number in range(len(self.blocks)):
            part = self._forward_block(number)
            if self._keeps_logits:
                self._block_n.append(part.n)
            parts = [part] if negatives is None else [negatives, part]
            negatives = combine_negatives(parts, self._reduction)
        return negatives

    def _forward_block(self, number: int) -> NegativeSums:
        weight = self._weight[self.blocks[number]]
        logits = self._buffer("logits", number)
        if not self._inputs.for_training:
            times_transposed(self._embedding, weight, logits)
            _, sums = self._reduce(number, logits)
            return NegativeSums(*sums)
        product = Product(self._embedding, weight, logits)
        slopes, sums = self._reduce(number, logits)
        return NegativeSums(*sums, grad_embedding=product.times(slopes))

    def weight_gradient(self, number: int, grad_n: nd.NDArray, n: nd.NDArray) -> RowGradient:
        """Return the gradient to the weights of a block, in memory the next block will reuse.

        Parameters
        ----------
        number : int
            Of the block in ``blocks``.
        grad_n : (B,)
            The gradient to n over all shards.
        n : (B,)
            That n.
        """
        weight, inverse = self._weight[self.blocks[number]], self._inverse_of(number)
        logits = self._buffer("logits", number)
        if self._keeps_logits:
            slopes, block_n = self._buffer("slopes", number), self._block_n[number]
        else:
            times_transposed(self._embedding, weight, logits)
            slopes, (block_n, *_) = self._reduce(number, logits)
        # The slopes are those of n of the block. The block's share of all of n scales the (B, D)
        # side of the product, which is the smaller one.
        share = grad_n * self._reduction.share(block_n, n)
        embedding = scale_rows(self._embedding, share)
        along = transposed = None
        if inverse is not None:
            # With ŵ = w / |w| and g the gradient to ŵ, that to w is (g - (g · ŵ) ŵ) / |w|, and
            # g · ŵ is the sum over the batch of share × slope × logit.
            along, transposed = product_over_batch(share, logits, slopes, self._workspace)
            along = along * inverse
        out = self._workspace.get("gradient", *weight.shape)
        transposed_times(slopes, transposed, embedding, out)
        return RowGradient(out, along, weight)

    def _reduce(self, number: int, logits: nd.NDArray) -> tuple[nd.NDArray, tuple]:
        """Return the slopes of a block's n to its logits, and the sums per sample.

        The slopes are divided by the weights' lengths; those of a log-sum-exp are probabilities.
        """
        block = self.blocks[number]
        centres = self._inputs.subcentres
        inside = (self._target_column >= block.start) & (self._target_column < block.stop)
        target_column = np.where(inside, (self._target_column - block.start) // centres, -1)
        offset = None
        if self._offset is not None:
            offset = self._offset[:, block.start // centres : block.stop // centres]
        slopes = self._buffer("slopes", number)
        sums = self._reduction.reduce(
            logits,
            self._inverse_of(number),
            target_column,
            offset,
            slopes,
            self._workspace,
            centres,
        )
        return slopes, sums

    def _inverse_of(self, number: int) -> nd.NDArray | None:
        """Return 1 / length of a block's weights, (classes, 1); None for inner products."""
        if not self._inputs.normalize:
            return None
        if number not in self._inverses:
            weight = self._weight[self.blocks[number]]
            # The gradient is made later; until then its memory serves as scratch space.
            scratch = self._workspace.get("gradient", *weight.shape)
            self._inverses[number] = inverse_norm(weight, scratch)
        return self._inverses[number]

    def _buffer(self, name: str, number: int) -> nd.NDArray:
        block = self.blocks[number]
        if self._keeps_logits:
            name = f"{name} {number}"
        return self._workspace.get(name, len(self._embedding), block.stop - block.start)


def _classes_per_block(rows: int, context: mx.Context) -> int:
    """Return how many classes to take at a time; on a GPU as many as are worth a launch."""
    is_swept_often = context.device_type == "cpu" and not operators.serve(context)
    # For a single block of theirs, more and smaller ones cost more than they save.
    return OFTEN_SWEPT_CLASSES if is_swept_often and rows > CACHED_CLASSES else CACHED_CLASSES
