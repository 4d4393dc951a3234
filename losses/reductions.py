"""How the logits of a sample's negatives become one number, n.

A criterion chooses one of these for each batch (`Criterion.reduction`).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Callable, ClassVar

import mxnet as mx
import numpy as np
from mxnet import nd

from dsoftmax.losses import operators
from dsoftmax.losses.kernels import (
    NOTHING,
    Workspace,
    activations_of,
    combine,
    from_numpy,
    nearest_of,
    probabilities_of,
    row_sum,
    spread_to,
)
from dsoftmax.losses.pieces import MOST_PIECES, Piece, pack, value_at_zero

if TYPE_CHECKING:
    from dsoftmax.losses.pieces import Number


class Reduction:
    """Base of the reductions: n is made of s h(z_k).

    Parameters
    ----------
    pieces : Piece
        Where h is not the identity; three at most.

    Attributes
    ----------
    nothing : float
        n of a sample without negatives.
    bias : (1,) or (B,) or None
        What n depends on beside the logits, with its gradient.
    """

    nothing: ClassVar[float]
    bias: nd.NDArray | None = None
    _packed: nd.NDArray | None = None  # the pieces for the operators, once bound

    def __init__(self, *pieces: Piece):
        self.pieces = _checked(pieces)

    def filtered(self, limit: float) -> Reduction:
        """Return the reduction that takes cosines above a limit for 0, without a gradient."""
        filtered = copy.copy(self)
        orthogonal = Piece(limit, (value_at_zero(self.pieces),), ())
        filtered.pieces = _checked((*self.pieces, orthogonal))
        return filtered

    def _map(self, function: Callable[[nd.NDArray], nd.NDArray]) -> Reduction:
        """Return the reduction with another array in the place of each."""

        def of_number(number: Number) -> Number:
            return function(number) if isinstance(number, nd.NDArray) else number

        mapped = copy.copy(self)
        mapped.pieces = tuple(piece.map(of_number) for piece in self.pieces)
        mapped.bias = of_number(self.bias)
        return mapped

    def _arrays(self) -> list[nd.NDArray]:
        """Return the arrays, in the order in which `_map` meets them."""
        found = []
        self._map(lambda array: found.append(array) or array)
        return found

    def of_samples(self, count: int) -> Reduction:
        """Return it without a gradient, and with an array (B,) for each (1,) of a batch of B."""
        return self._map(lambda array: array.detach().broadcast_to((count,)))

    def take(self, samples: np.ndarray) -> Reduction:
        """Return the reduction of some samples of the batch."""
        return self._map(lambda array: nd.take(array, from_numpy(samples, array.context)))

    def bind(self, scale: float, count: int, context: mx.Context) -> Reduction:
        """Return the reduction of logits, (B, classes) on a context, that are scale × z."""
        bound = self._map(lambda array: array.as_in_context(context))
        bound.pieces = tuple(piece.scaled(scale) for piece in bound.pieces)
        if (bound.pieces or bound.bias is not None) and operators.serve(context):
            bound._packed = pack(bound.pieces, count, context)
        return bound

    def reduce(
        self,
        logits: nd.NDArray,
        inverse: nd.NDArray | None,
        target_column: np.ndarray,
        offset: nd.NDArray | None,
        out: nd.NDArray,
        workspace: Workspace,
        centres: int = 1,
    ) -> tuple[nd.NDArray, ...]:
        """Return n, the sum and the largest of the logits, (B,) each, and what else it sums up.

        The arguments are those of `kernels.probabilities_of`; the reduction must be bound.
        """
        if centres == 1 or operators.serve(logits.context):
            return self._reduce(logits, inverse, target_column, offset, out, workspace, centres)
        nearest, place = nearest_of(logits, inverse, centres, workspace)
        slopes = workspace.get("slopes of classes", *nearest.shape)
        n, *others = self._reduce(nearest, None, target_column, offset, slopes, workspace, 1)
        spread_to(out, slopes, place, inverse, workspace)
        return (n + 0 * row_sum(logits).reshape(-1), *others)  # maxima overlook a NaN, sums don't

    def _reduce(
        self, logits, inverse, target_column, offset, out, workspace, centres
    ) -> tuple[nd.NDArray, ...]:
        """Do what `reduce` does, by the operators if there are several centres per class."""
        raise NotImplementedError

    def combine(self, parts: list[nd.NDArray]) -> nd.NDArray:
        """Return n of all classes from those of some classes each."""
        raise NotImplementedError

    def share(self, part: nd.NDArray, n: nd.NDArray) -> nd.NDArray:
        """Return the slope of n to that of some classes, (B,)."""
        raise NotImplementedError


class LogSumExp(Reduction):
    """n = log Σ e^(s h(z_k))."""

    nothing = NOTHING

    def _reduce(self, logits, inverse, target_column, offset, out, workspace, centres):
        """Return n, and the sum and the largest of the logits, (B,) each."""
        shape = (self.pieces, self._packed, centres)
        return probabilities_of(logits, inverse, target_column, offset, out, workspace, *shape)

    def combine(self, parts: list[nd.NDArray]) -> nd.NDArray:
        """Return the log-sum-exp of log-sum-exps."""
        return combine(parts)

    def share(self, part: nd.NDArray, n: nd.NDArray) -> nd.NDArray:
        """Return the share of some classes in the sum, (B,)."""
        return nd.exp(part - n)


class SoftplusSum(Reduction):
    """n = Σ softplus(s h(z_k) - bias): each negative against a threshold.

    Parameters
    ----------
    bias : (1,)
        May depend on learned numbers, to which n sends its gradient.
    *pieces : Piece
    """

    nothing = 0.0

    def __init__(self, bias: nd.NDArray, *pieces: Piece):
        super().__init__(*pieces)
        self.bias = bias

    def _reduce(self, logits, inverse, target_column, offset, out, workspace, centres):
        """Return n, the sum and the largest of the logits, and the mass, (B,) each."""
        sums, shape = (offset, self.bias, out, workspace), (self.pieces, self._packed, centres)
        return activations_of(logits, inverse, target_column, *sums, *shape)

    def combine(self, parts: list[nd.NDArray]) -> nd.NDArray:
        """Return the sum of sums."""
        return nd.add_n(*parts)

    def share(self, part: nd.NDArray, n: nd.NDArray) -> nd.NDArray:
        """Return 1 for each sample."""
        return nd.ones_like(n)


def _checked(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    if len(pieces) > MOST_PIECES:
        raise ValueError(
            f"a reduction has {MOST_PIECES} pieces at most, a filter included, not {len(pieces)}"
        )
    return pieces


LOG_SUM_EXP = LogSumExp()


def join(parts: list[Reduction]) -> Reduction:
    """Return the reduction of all samples of several batches, each made by `of_samples`."""
    if len(parts) == 1:
        return parts[0]
    arrays = zip(*(part._arrays() for part in parts))
    return parts[0]._map(lambda _: nd.concat(*next(arrays), dim=0))
