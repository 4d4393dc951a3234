"""h, a function of each negative's cosine: the identity, and polynomials above some thresholds.

Pieces are data, not code, so that one pass of the kernels serves every loss that reshapes the
cosines of its negatives.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Callable, NamedTuple, Union

import mxnet as mx
from mxnet import nd

if TYPE_CHECKING:
    Number = Union[float, nd.NDArray]  # of all samples, or one per sample, (B,)

DEGREE = 3  # the highest of a piece
MOST_PIECES = 3
NUMBERS = 2 * (DEGREE + 1)  # of a packed piece


class Piece(NamedTuple):
    """A polynomial that takes the place of z, and of former pieces, where z is above `start`.

    Examples
    --------
    >>> Piece.polynomial(0.5, 0.25, 0, 1)    # z > 0.5 becomes 0.25 + z²
    Piece(start=0.5, value=(0.25, 0, 1), slope=(0, 2))
    """

    start: Number
    value: tuple[Number, ...]  # factors of 1, z, z², z³
    slope: tuple[Number, ...]  # of the derivative, or of what is to take its place: 1, z, z²

    @classmethod
    def polynomial(cls, start: Number, *value: Number) -> Piece:
        """Return the piece with the true derivative."""
        return cls(start, value, tuple(power * value[power] for power in range(1, len(value))))

    def scaled(self, scale: float) -> Piece:
        """Return the piece of scale × h as a function of scale × z."""
        return Piece(
            scale * self.start,
            tuple(scale ** (1 - power) * factor for power, factor in enumerate(self.value)),
            tuple(scale**-power * factor for power, factor in enumerate(self.slope)),
        )

    def map(self, function: Callable[[Number], Number]) -> Piece:
        """Return the piece with another number in the place of each."""
        value, slope = (tuple(map(function, factors)) for factors in self[1:])
        return Piece(function(self.start), value, slope)


def value_at_zero(pieces: tuple[Piece, ...]) -> Number:
    """Return h(0)."""
    value = 0.0
    for piece in pieces:
        is_above = piece.start < 0
        value = is_above * piece.value[0] + (1 - is_above) * value
    return value


def pack(pieces: tuple[Piece, ...], batch: int, context: mx.Context) -> nd.NDArray:
    """Return the numbers of the pieces as the compiled operators take them, (B, 8 × pieces)."""
    numbers = []
    for start, value, slope in pieces or [Piece(math.inf, (), ())]:
        numbers += [start, *value, *[0.0] * (DEGREE + 1 - len(value))]
        numbers += [*slope, *[0.0] * (DEGREE - len(slope))]
    columns = [
        number if isinstance(number, nd.NDArray) else nd.full((batch,), number, ctx=context)
        for number in numbers
    ]
    return nd.stack(*columns, axis=1)


def shape(z: nd.NDArray, pieces: tuple[Piece, ...]) -> tuple[nd.NDArray, nd.NDArray]:
    """Return h and its slope at each number, (B, C) both, by MXNet's operators."""
    value, slope = z, nd.ones_like(z)
    for piece in pieces:
        if isinstance(piece.start, nd.NDArray):
            is_above = nd.broadcast_greater(z, piece.start.reshape((-1, 1)))
        else:
            is_above = z > piece.start
        value = nd.where(is_above, _polynomial(z, piece.value), value)
        slope = nd.where(is_above, _polynomial(z, piece.slope), slope)
    return value, slope


def _polynomial(z: nd.NDArray, factors: tuple[Number, ...]) -> nd.NDArray:
    *lower, highest = factors or (0.0,)
    if not lower:
        return _plus(nd.zeros_like(z), highest)
    total = _times(z, highest)
    for place, factor in enumerate(reversed(lower)):
        total = _plus(total * z if place else total, factor)
    return total


def _plus(z: nd.NDArray, number: Number) -> nd.NDArray:
    if isinstance(number, nd.NDArray):
        return nd.broadcast_add(z, number.reshape((-1, 1)))
    return z + number if number else z


def _times(z: nd.NDArray, number: Number) -> nd.NDArray:
    if isinstance(number, nd.NDArray):
        return nd.broadcast_mul(z, number.reshape((-1, 1)))
    return z if number == 1 else number * z
