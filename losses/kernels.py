"""The passes over rows and columns of a step, beside its matrix products.

Each pass is one sweep of a compiled operator (`operators`) if those are built. Otherwise it is made
of MXNet's operators, of which some are many times as fast as others with the same result.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from typing import TYPE_CHECKING, Iterator, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.base import _LIB, check_call

from dsoftmax.losses import operators
from dsoftmax.losses.pieces import Piece, shape

if TYPE_CHECKING:
    from dsoftmax.losses.pieces import Number

operators.load()

# Stands for the logarithm of an empty sum. Finite, so that no difference of two is NaN.
NOTHING = -1e30
SMALLEST_NORM = 1e-10


class Workspace:
    """Memory that every step reuses: fresh pages cost more than the arithmetic on them."""

    def __init__(self, context: mx.Context):
        self.context = context
        self._buffers: dict[str, nd.NDArray] = {}

    def get(self, name: str, *shape: int) -> nd.NDArray:
        """Return an array of this shape, with undefined content, in the memory of this name."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = nd.empty((size,), ctx=self.context)
        return self._buffers[name][:size].reshape(shape)


def from_numpy(array: np.ndarray, context: mx.Context, dtype: str = "int32") -> nd.NDArray:
    """Return a copy of an array on a context, without delay.

    `nd.array` waits for everything queued on the CPU, and `nd.from_numpy(zero_copy=True)` lets an
    engine thread free the numpy array, which aborts a process while Python shuts down. Nobody else
    uses the memory of a new array yet, so it can be written at once. It is memory of the context
    itself if that is a CPU, so that nothing is copied.
    """
    array = np.ascontiguousarray(array, dtype)
    copied = nd.empty(array.shape, context if context.device_type == "cpu" else mx.cpu(0), dtype)
    memory = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(copied.handle, ctypes.byref(memory)))
    ctypes.memmove(memory, array.ctypes.data, array.nbytes)
    return copied.as_in_context(context)


def take_rows(matrix: nd.NDArray, rows: np.ndarray, out: nd.NDArray | None = None) -> nd.NDArray:
    """Return rows of a matrix, (n, D): by Embedding, several times as fast as `take`."""
    index = from_numpy(rows, matrix.context)
    count, width = matrix.shape
    return nd.Embedding(index, matrix, input_dim=count, output_dim=width, out=out)


def row_products(
    matrix: nd.NDArray, rows: np.ndarray, vectors: nd.NDArray, places: np.ndarray
) -> nd.NDArray:
    """Return the inner product of each of n rows of a matrix and a vector, (n,).

    Where the operators serve only: they read the rows where they lie.

    Parameters
    ----------
    matrix : (K, D)
    rows : (n,) int64
    vectors : (B, D)
    places : (n,) int64
        Which of the vectors.
    """
    products = operators.output(matrix.context, len(rows))
    rows, places = (from_numpy(index, matrix.context) for index in (rows, places))
    operators.queue("row_products", [products], [matrix, rows, vectors, places])
    return products


def add_rows(matrix: nd.NDArray, rows: np.ndarray, values: nd.NDArray) -> None:
    """Add values (n, D) to distinct rows of a matrix, in place."""
    set_rows(matrix, rows, values + take_rows(matrix, rows))


def set_rows(matrix: nd.NDArray, rows: np.ndarray, values: nd.NDArray) -> None:
    """Set distinct rows of a matrix to values (n, D), in place."""
    index = from_numpy(rows, matrix.context).reshape((1, -1))
    nd._internal._scatter_set_nd(matrix, values, index, shape=matrix.shape, out=matrix)


@contextlib.contextmanager
def copied_rows(
    arrays: list[nd.NDArray],
    rows: np.ndarray,
    workspace: Workspace,
    first: nd.NDArray | None = None,
) -> Iterator[list[nd.NDArray]]:
    """Lend copies of distinct rows of some arrays, and write them back at the end.

    So any dense update is one of these rows alone. MXNet's own updates of rows are no substitute:
    their sparse gradient can't be made without waiting for the device, they exist for few
    optimizers, and some of them (``ftrl``) silently update all rows.

    Parameters
    ----------
    arrays : list of (K, D)
    rows : (n,)
    workspace : Workspace
        On the arrays' context.
    first : (n, D), optional
        A copy of the first array's rows, if there is one that nobody needs any more.
    """
    copies = [] if first is None else [first]
    for place, array in enumerate(arrays[len(copies) :]):
        buffer = workspace.get(f"copy {place}", len(rows), array.shape[1])
        copies.append(take_rows(array, rows, buffer))
    yield copies
    for array, copied in zip(arrays, copies):
        set_rows(array, rows, copied)


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
    if operators.serve(vectors.context):
        inverse = operators.output(vectors.context, len(vectors), 1)
        operators.queue("inverse_norm", [inverse], [vectors])
        return inverse
    squared = row_sum(nd.square(vectors, out=scratch))
    return (squared > SMALLEST_NORM**2) * nd.rsqrt(nd.maximum(squared, SMALLEST_NORM**2))


def scale_rows(matrix: nd.NDArray, factor: nd.NDArray) -> nd.NDArray:
    """Return the rows of a matrix (n, D) times a factor each, (n,) or (n, 1)."""
    if operators.serve(matrix.context):
        scaled = operators.output(matrix.context, *matrix.shape)
        operators.queue("scale_rows", [scaled], [matrix, factor])
        return scaled
    return nd.broadcast_mul(matrix, factor.reshape((-1, 1)))


def project(gradient: nd.NDArray, vectors: nd.NDArray, inverse: nd.NDArray) -> nd.NDArray:
    """Turn a gradient to normalised rows into one to the rows themselves.

    Parameters
    ----------
    gradient : (n, D)
        To ``vectors * inverse``.
    vectors : (n, D)
    inverse : (n, 1)
        As returned by `inverse_norm`.

    Returns
    -------
    (n, D)
    """
    if operators.serve(gradient.context):
        projected = operators.output(gradient.context, *gradient.shape)
        operators.queue("project", [projected], [gradient, vectors, inverse])
        return projected
    along = row_sum(gradient * vectors) * nd.square(inverse)
    return nd.broadcast_mul(gradient - nd.broadcast_mul(vectors, along), inverse)


def probabilities_of(
    logits: nd.NDArray,
    inverse: nd.NDArray | None,
    target_column: np.ndarray,
    offset: nd.NDArray | None,
    out: nd.NDArray,
    workspace: Workspace,
    pieces: tuple[Piece, ...] = (),
    packed: nd.NDArray | None = None,
    centres: int = 1,
) -> tuple[nd.NDArray, nd.NDArray, nd.NDArray]:
    """Make the probabilities of products with class weights, and the products' sums.

    Parameters
    ----------
    logits : (B, C × centres)
        Products with the weights. In place, they are divided by the weights' norms and, with one
        centre per class, those with a sample's own class become `NOTHING`.
    inverse : (C × centres, 1) or None
        As returned by `inverse_norm`; None to keep the norms.
    target_column : (B,) int64
        The column of each sample's own class; -1 for none.
    offset : (1, C) or None
        To be added to the logits, not in place.
    out : (B, C × centres)
        For the probabilities times the slopes of `pieces`, divided by the weights' norms; 0 for a
        sample's own class, and for all but the nearest centre of a class.
    workspace : Workspace
        On the logits' context.
    pieces : tuple of Piece
        What becomes of the logits before the sum, not in place.
    packed : (B, 9 × pieces)
        The pieces as `pack` returns them, if there are any and the operators serve the context.
    centres : int
        Several only if the operators serve the context.

    Returns
    -------
    n, total, largest : (B,) each
        Over the logits but that of the own class: the log-sum-exp with pieces and offset, and the
        sum and the largest without them.
    """
    context, (batch, rows) = logits.context, logits.shape
    if operators.serve(context):
        inverse = nd.ones((rows, 1), ctx=context) if inverse is None else inverse
        offset = nd.zeros((1, rows // centres), ctx=context) if offset is None else offset
        sums = tuple(operators.output(context, batch) for _ in range(3))
        written, read = [logits, out, *sums], [inverse, from_numpy(target_column, context), offset]
        if pieces:
            operators.queue("shaped_probabilities", written, [*read, packed])
        else:
            operators.queue("probabilities", written, read)
        return sums
    total = _scale_columns(logits, inverse, target_column)
    shaped, slope, shift = _shape(logits, pieces, out, workspace)
    _mask(logits, target_column)
    largest = row_max(logits)
    if offset is not None:
        shaped = nd.broadcast_add(shaped, offset, out=out)
    if shaped is logits:
        nd.softmax(shaped, out=out)
        # The largest probability is exp(largest logit - n).
        n = largest - nd.log(row_max(out))
    else:
        _mask(shaped, target_column)
        # Any logit will do that is no mask: its log-softmax is what n takes from it.
        columns = from_numpy((target_column == 0) & (rows > 1), context)
        n = nd.pick(shaped, columns) + shift
        n = n - nd.pick(nd.log_softmax(shaped, out=workspace.get("terms", *logits.shape)), columns)
        nd.softmax(shaped, out=out)
    if slope is not None:
        nd.elemwise_mul(out, slope, out=out)
    if inverse is not None:
        nd.broadcast_mul(out, inverse.reshape((1, -1)), out=out)
    # Maxima overlook a NaN, sums don't.
    return n + 0 * total, total, largest


def activations_of(
    logits: nd.NDArray,
    inverse: nd.NDArray | None,
    target_column: np.ndarray,
    offset: nd.NDArray | None,
    bias: nd.NDArray,
    out: nd.NDArray,
    workspace: Workspace,
    pieces: tuple[Piece, ...] = (),
    packed: nd.NDArray | None = None,
    centres: int = 1,
) -> tuple[nd.NDArray, nd.NDArray, nd.NDArray, nd.NDArray]:
    """Sum softplus(logit - bias) over products with class weights, and make its slopes.

    Parameters
    ----------
    logits, inverse, target_column, workspace, pieces, packed, centres
        As for `probabilities_of`; packed even without pieces.
    offset : (1, C) or None
        The logarithms of factors of the sum's terms.
    bias : (B,)
    out : (B, C × centres)
        For the slopes of the sum to the logits, divided by the weights' norms; 0 for a sample's
        own class, and for all but the nearest centre of a class.

    Returns
    -------
    n, total, largest, mass : (B,) each
        Over the logits but that of the own class: the sum, the sum and the largest of the logits
        themselves, and minus the slope of n to the bias.
    """
    context, (batch, rows) = logits.context, logits.shape
    if operators.serve(context):
        inverse = nd.ones((rows, 1), ctx=context) if inverse is None else inverse
        weight = nd.ones((1, rows // centres), ctx=context)
        weight = weight if offset is None else nd.exp(offset)
        own = from_numpy(target_column, context)
        sums = tuple(operators.output(context, batch) for _ in range(4))
        operators.queue("activations", [logits, out, *sums], [inverse, own, weight, bias, packed])
        return sums
    total = _scale_columns(logits, inverse, target_column)
    shaped, slope, shift = _shape(logits, pieces, out, workspace)
    nd.broadcast_sub(shaped, (bias - shift).reshape((-1, 1)), out=out)
    for array in (logits, out):
        _mask(array, target_column)
    # Not nd.sigmoid, which takes six times as long.
    softplus = workspace.get("terms", *logits.shape)
    nd.Activation(out, act_type="softrelu", out=softplus)
    nd.Activation(out, act_type="sigmoid", out=out)
    if offset is not None:
        for array in (out, softplus):
            nd.broadcast_mul(array, nd.exp(offset), out=array)
    n, mass = row_sum(softplus).reshape(-1) + 0 * total, row_sum(out).reshape(-1)
    if slope is not None:
        nd.elemwise_mul(out, slope, out=out)
    if inverse is not None:
        nd.broadcast_mul(out, inverse.reshape((1, -1)), out=out)
    return n, total, row_max(logits), mass


def _shape(
    logits: nd.NDArray, pieces: tuple[Piece, ...], out: nd.NDArray, workspace: Workspace
) -> tuple[nd.NDArray, nd.NDArray | None, Number]:
    """Return logits that pieces have shaped, less a shift per row, the slopes and the shift."""
    if not pieces:
        return logits, None, 0.0
    slope, mask = (workspace.get(name, *logits.shape) for name in ("slope", "mask"))
    slope, shift = shape(logits, pieces, out, slope, mask)
    return out, slope, shift


def _scale_columns(
    logits: nd.NDArray, inverse: nd.NDArray | None, target_column: np.ndarray
) -> nd.NDArray:
    """Divide logits by the weights' norms, in place; return their sums but for the own class."""
    if inverse is not None:
        nd.broadcast_mul(logits, inverse.reshape((1, -1)), out=logits)
    total = row_sum(logits).reshape(-1)
    has_target = target_column >= 0
    if has_target.any():
        # Not by gather_nd: on a GPU it waits, to check its indices.
        own = nd.pick(logits, from_numpy(np.maximum(target_column, 0), logits.context))
        total = total - own * from_numpy(has_target, logits.context, "float32")
    return total


def _mask(logits: nd.NDArray, target_column: np.ndarray) -> None:
    """Set the logit of each sample's own class to `NOTHING`, in place."""
    samples = np.flatnonzero(target_column >= 0)
    if len(samples):
        places = from_numpy(np.stack([samples, target_column[samples]]), logits.context)
        nothing = nd.full((len(samples),), NOTHING, ctx=logits.context)
        nd._internal._scatter_set_nd(logits, nothing, places, shape=logits.shape, out=logits)


def nearest_of(
    logits: nd.NDArray, inverse: nd.NDArray | None, centres: int, workspace: Workspace
) -> tuple[nd.NDArray, nd.NDArray]:
    """Return the largest logit of each class, (B, C), and which of its centres has it, (B, C).

    By MXNet's operators alone: the compiled ones do it on the way. A NaN may be overlooked.

    Parameters
    ----------
    logits : (B, C × centres)
        Products with the weights, which are divided by their norms in place.
    inverse : (C × centres, 1) or None
        As returned by `inverse_norm`; None to keep the norms.
    centres : int
    workspace : Workspace
        On the logits' context.
    """
    if inverse is not None:
        nd.broadcast_mul(logits, inverse.reshape((1, -1)), out=logits)
    batch, classes = len(logits), logits.shape[1] // centres
    names = ("nearest", "place", "other", "mask")
    nearest, place, other, is_nearer = (workspace.get(name, batch, classes) for name in names)
    # Centre by centre: max and argmax along the short axis take many times as long.
    for number in range(centres):
        every = {"begin": (number,), "end": (None,), "step": (centres,)}
        out = other if number else nearest
        nd.slice(logits.reshape(-1), **every, out=out.reshape(-1))
        if number:
            nd.broadcast_greater(other, nearest, out=is_nearer if number > 1 else place)
            nd.broadcast_maximum(nearest, other, out=nearest)
        if number > 1:
            nd.broadcast_maximum(place, number * is_nearer, out=place)
    return nearest, place


def spread_to(
    out: nd.NDArray,
    slopes: nd.NDArray,
    place: nd.NDArray,
    inverse: nd.NDArray | None,
    workspace: Workspace,
) -> None:
    """Give the slope of each class, (B, C), to its nearest centre, divided by the weight's norm.

    Parameters
    ----------
    out : (B, C × centres)
        0 for the other centres.
    slopes, place : (B, C)
        The place is that of `nearest_of`.
    inverse : (C × centres, 1) or None
    workspace : Workspace
        On their context.
    """
    shape = (*slopes.shape, out.shape[1] // slopes.shape[1])
    is_nearest = nd.one_hot(place, shape[2], out=workspace.get("is nearest", *shape))
    nd.broadcast_mul(is_nearest, slopes.reshape((*slopes.shape, 1)), out=out.reshape(shape))
    if inverse is not None:
        nd.broadcast_mul(out, inverse.reshape((1, -1)), out=out)


def product_over_batch(
    share: nd.NDArray, logits: nd.NDArray, probabilities: nd.NDArray, workspace: Workspace
) -> tuple[nd.NDArray, nd.NDArray | None]:
    """Sum share (B,) × logit × probability (B, C) over the batch.

    Returns
    -------
    sums : (C, 1)
    transposed : (C, B) or None
        The transposed probabilities, if they were a by-product. The logits may be overwritten.
    """
    batch, classes = logits.shape
    if operators.serve(logits.context):
        sums = operators.output(logits.context, classes, 1)
        transposed = workspace.get("transposed", classes, batch)
        operators.queue("along", [sums, transposed], [share, logits, probabilities])
        return sums, transposed
    nd.elemwise_mul(logits, probabilities, out=logits)
    return nd.dot(share.expand_dims(0), logits).reshape((-1, 1)), None


class RowGradient(NamedTuple):
    """A gradient to some class weights, ``values - along * weight``."""

    values: nd.NDArray  # (n, D)
    along: nd.NDArray | None = None  # (n, 1)
    weight: nd.NDArray | None = None  # (n, D), if there is `along`

    def whole(self) -> nd.NDArray:
        """Return the gradient, (n, D), in the memory of the values."""
        if self.along is not None:
            nd.elemwise_sub(self.values, nd.broadcast_mul(self.weight, self.along), out=self.values)
        return self.values


class Sgd(NamedTuple):
    """The numbers of an update by stochastic gradient descent."""

    lr: float
    momentum: float
    wd: float
    rescale_grad: float
    clip_gradient: float | None

    def numbers(self) -> tuple[float, ...]:
        """Return the numbers in the order of the operators; without a limit it is infinite."""
        return (*self[:-1], self.clip_gradient or math.inf)

    def update(
        self,
        weight: nd.NDArray,
        state: nd.NDArray | None,
        rows: np.ndarray | None,
        gradient: RowGradient,
        workspace: Workspace,
    ) -> None:
        """Update rows of the weights and, where there is momentum, of the state, in place.

        Parameters
        ----------
        weight, state : (K, D)
        rows : (n,) or None
            Distinct; None for all.
        gradient : RowGradient
            Of these rows, on the weights' context.
        workspace : Workspace
            On that context.
        """
        context = weight.context
        arrays = [weight] if state is None else [weight, state]
        if operators.serve(context):
            count = len(gradient.values)
            along = gradient.along
            along = nd.zeros((count, 1), ctx=context) if along is None else along
            rows = from_numpy(np.arange(count) if rows is None else rows, context)
            operators.queue("sgd", arrays, [gradient.values, along, rows], self.numbers())
        elif rows is None:
            self._update_all(gradient.whole(), *arrays)
        else:
            # The step's own copy of the weights has served its purpose when the gradient is whole.
            with copied_rows(arrays, rows, workspace, gradient.weight) as copies:
                self._update_all(gradient.whole(), *copies)

    def _update_all(
        self, values: nd.NDArray, weight: nd.NDArray, state: nd.NDArray | None = None
    ) -> None:
        """Update all rows by a gradient of these values, by MXNet's operators."""
        options = {**self._asdict(), "clip_gradient": self.clip_gradient or -1.0}
        if state is None:
            del options["momentum"]
            nd.sgd_update(weight, values, out=weight, **options)
        else:
            nd.sgd_mom_update(weight, values, state, out=weight, **options)


def combine(parts: list[nd.NDArray]) -> nd.NDArray:
    """Return the log-sum-exp of several log-sum-exps, arrays (B,) on one context."""
    if len(parts) == 1:
        return parts[0]
    stacked = nd.stack(*parts, axis=1)
    largest = nd.max(stacked, axis=1, keepdims=True)
    return (largest + nd.log(nd.sum(nd.exp(stacked - largest), axis=1, keepdims=True))).reshape(-1)
