"""The passes over rows and columns that a step is made of, beside its matrix products.

MXNet's operators differ widely in speed where their results are the same; these are the fast ones.
"""

from __future__ import annotations

import math

import mxnet as mx
import numpy as np
from mxnet import nd

# Stands for the logarithm of an empty sum. Finite, so that no difference of two is NaN.
NOTHING = -1e30
SMALLEST_NORM = 1e-10


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


def take_rows(matrix: nd.NDArray, rows: np.ndarray, out: nd.NDArray | None = None) -> nd.NDArray:
    """Return rows of a matrix, (n, D): by Embedding, several times as fast as `take`."""
    index = nd.array(rows, ctx=matrix.context, dtype="int32")
    count, width = matrix.shape
    return nd.Embedding(index, matrix, input_dim=count, output_dim=width, out=out)


def add_rows(matrix: nd.NDArray, rows: np.ndarray, values: nd.NDArray) -> None:
    """Add values (n, D) to distinct rows of a matrix, in place."""
    index = nd.array(rows, ctx=matrix.context, dtype="int32").reshape((1, -1))
    values = values + take_rows(matrix, rows)
    nd._internal._scatter_set_nd(matrix, values, index, shape=matrix.shape, out=matrix)


def row_sum(matrix: nd.NDArray) -> nd.NDArray:
    """Return the sum of each row, (n, 1): by a product with ones, ten times as fast as `sum`."""
    ones = nd.ones((1, matrix.shape[1]), ctx=matrix.context)
    return nd.FullyConnected(matrix, ones, no_bias=True, num_hidden=1)


def row_max(matrix: nd.NDArray) -> nd.NDArray:
    """Return the largest of each row, (B,): by max pooling, which is five times as fast as max."""
    pooled = nd.Pooling(
        matrix.reshape((1, matrix.shape[0], matrix.shape[1])),
        global_pool=True,
        pool_type="max",
        kernel=(1,),
    )
    return pooled.reshape(-1)


def inverse_norm(vectors: nd.NDArray, scratch: nd.NDArray | None = None) -> nd.NDArray:
    """Return 1 / length of each row, (n, 1); 0 for a row of zeros, which has no direction.

    `scratch` may be memory of the vectors' shape to work in.
    """
    squared = row_sum(nd.square(vectors, out=scratch))
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
    along = row_sum(gradient * vectors) * nd.square(inverse)
    gradient -= nd.broadcast_mul(vectors, along)
    return nd.broadcast_mul(gradient, inverse, out=gradient)


def combine(parts: list[nd.NDArray]) -> nd.NDArray:
    """Return the log-sum-exp of several log-sum-exps, arrays (B,) on one context."""
    if len(parts) == 1:
        return parts[0]
    stacked = nd.stack(*parts, axis=1)
    largest = nd.max(stacked, axis=1, keepdims=True)
    return (largest + nd.log(nd.sum(nd.exp(stacked - largest), axis=1, keepdims=True))).reshape(-1)
