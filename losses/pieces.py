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


def values_of(z: nd.NDArray, pieces: tuple[Piece, ...]) -> nd.NDArray:
    """Return h of each number, (B, C)."""
    shaped = z
    for piece in pieces:
        shaped = nd.where(_is_above(z, piece.start), _polynomial(z, piece.value), shaped)
    return shaped


def slopes_of(z: nd.NDArray, pieces: tuple[Piece, ...]) -> nd.NDArray:
    """Return the derivative of h at each number, (B, C)."""
    slope = nd.ones_like(z)
    for piece in pieces:
        slope = nd.where(_is_above(z, piece.start), _polynomial(z, piece.slope), slope)
    return slope


def _is_above(z: nd.NDArray, start: Number) -> nd.NDArray:
    if isinstance(start, nd.NDArray):
        return nd.broadcast_greater(z, start.reshape((-1, 1)))
    return z > start


def _polynomial(z: nd.NDArray, factors: tuple[Number, ...]) -> nd.NDArray:
    total = nd.zeros_like(z)
    for place, factor in enumerate(reversed(factors)):
        if place:
            total = total * z
        if isinstance(factor, nd.NDArray):
            total = nd.broadcast_add(total, factor.reshape((-1, 1)))
        elif factor:
            total = total + factor
    return total
