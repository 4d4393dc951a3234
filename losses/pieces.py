"""h, a function of each negative's cosine: the identity, and polynomials above some thresholds.

Pieces are data, not code, so that one pass of the kernels serves every loss that reshapes the
cosines of its negatives. MXNet's operators need several passes (`shape`).
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


class Piece(NamedTuple):
    """A polynomial that takes the place of z, and of former pieces, where z is above `start`.

    It is constant below `floor`.

    Examples
    --------
    >>> Piece.polynomial(0.5, 0.25, 0, 1)    # z > 0.5 becomes 0.25 + z²
    Piece(start=0.5, value=(0.25, 0, 1), slope=(0, 2), floor=-inf)
    """

    start: Number
    value: tuple[Number, ...]  # factors of 1, z, z², z³
    slope: tuple[Number, ...]  # of the derivative, or of what is to take its place: 1, z, z²
    floor: float = -math.inf  # takes the place of z below it in this piece

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
            scale * self.floor,
        )

    def map(self, function: Callable[[Number], Number]) -> Piece:
        """Return the piece with another number in the place of each."""
        value, slope = (tuple(map(function, factors)) for factors in (self.value, self.slope))
        return Piece(function(self.start), value, slope, self.floor)

    @property
    def is_everywhere(self) -> bool:
        """Whether nothing remains below the start."""
        return not isinstance(self.start, nd.NDArray) and self.start == -math.inf

    @property
    def is_linear(self) -> bool:
        """Whether it is a z + b with the true slope and a number a other than 1, or constant."""
        if len(self.value) == 1 and not self.slope:
            return True
        is_straight = len(self.value) == 2 and len(self.slope) == 1 and self.floor == -math.inf
        a = self.slope[0] if is_straight else 1
        return not isinstance(a, nd.NDArray) and a not in (0, 1) and a == self.value[1]


def value_at_zero(pieces: tuple[Piece, ...]) -> Number:
    """Return h(0)."""
    value = 0.0
    for piece in pieces:
        at_zero = sum(factor * max(piece.floor, 0) ** n for n, factor in enumerate(piece.value))
        is_above = piece.start < 0
        value = is_above * at_zero + (1 - is_above) * value
    return value


def pack(pieces: tuple[Piece, ...], batch: int, context: mx.Context) -> nd.NDArray:
    """Return the numbers of the pieces as the compiled operators take them, (B, 9 × pieces)."""
    numbers = []
    for start, value, slope, floor in pieces or [Piece(math.inf, (), ())]:
        numbers += [start, *value, *[0.0] * (DEGREE + 1 - len(value))]
        numbers += [*slope, *[0.0] * (DEGREE - len(slope)), floor]
    columns = [
        number if isinstance(number, nd.NDArray) else nd.full((batch,), number, ctx=context)
        for number in numbers
    ]
    return nd.stack(*columns, axis=1)


def shape(
    z: nd.NDArray,
    pieces: tuple[Piece, ...],
    value: nd.NDArray,
    slope: nd.NDArray,
    scratch: nd.NDArray,
) -> tuple[nd.NDArray, Number]:
    """Compute h and its slope at each number by MXNet's operators.

    Each of them is a pass through memory, so they are few and in place, and what is equal in a
    whole row is left to the caller. Masks of 0 and 1 select: `where` takes as long as eight
    products.

    Parameters
    ----------
    z : (B, C)
    pieces : tuple of Piece
        One at least.
    value : (B, C)
        For h less the shift.
    slope, scratch : (B, C)
        Memory to work in.

    Returns
    -------
    slope : (B, C)
        In the memory of `slope` or `scratch`.
    shift : float or (B,)
    """
    former, shift = z, 0.0
    for piece in pieces:
        if piece.is_everywhere:
            floored = _floored(z, piece.floor, scratch)
            shift, *factors = piece.value
            _polynomial(floored, (0.0, *factors), value)
            _polynomial(floored, piece.slope, slope)
        elif piece.is_linear and (former is z or not piece.slope):
            # With a z + b above the start, h + c is the former h + c times a there, 1 elsewhere.
            a = piece.slope[0] if piece.slope else 0.0
            c = piece.value[0] / (a - 1)
            _compare("lesser_equal", z, piece.start, scratch)
            if a:
                nd.contrib.quadratic(scratch, a=0.0, b=1 - a, c=a, out=scratch)
            nd.elemwise_mul(_plus(former, shift + c, value), scratch, out=value)
            if former is z:
                slope, scratch = scratch, slope
            else:
                nd.elemwise_mul(slope, scratch, out=slope)
            shift = -c
        elif former is z and piece.floor == -math.inf:
            _compare("greater", z, piece.start, scratch)
            constant, first, *others = (*piece.value, 0.0, 0.0)
            _polynomial(z, (constant, first - 1, *others), value)
            nd.elemwise_mul(value, scratch, out=value)
            nd.elemwise_add(value, z, out=value)
            first, *others = (*piece.slope, 0.0)
            _polynomial(z, (first - 1, *others), slope)
            nd.elemwise_mul(slope, scratch, out=slope)
            _plus(slope, 1.0, slope)
        else:
            if former is z:
                nd.identity(z, out=value)
                slope[:] = 1
            _plus(value, shift, value)
            shift = 0.0
            floored = _floored(z, piece.floor, nd.zeros_like(z))
            _compare("greater", z, piece.start, scratch)
            for array, factors in ((value, piece.value), (slope, piece.slope)):
                change = _polynomial(floored, factors, nd.zeros_like(z)) - array
                nd.elemwise_add(array, change * scratch, out=array)
        former = value
    return slope, shift


def _floored(z: nd.NDArray, floor: float, out: nd.NDArray) -> nd.NDArray:
    return z if floor == -math.inf else nd._internal._maximum_scalar(z, scalar=floor, out=out)


def _polynomial(z: nd.NDArray, factors: tuple[Number, ...], out: nd.NDArray) -> nd.NDArray:
    """Compute Σ factor × z^power, of factors of 1, z, z², …, into other memory than that of z."""
    constant, *factors = factors or (0.0,)
    while len(factors) > 1 and not isinstance(factors[-1], nd.NDArray) and not factors[-1]:
        factors.pop()
    if len(factors) > 2 or any(isinstance(factor, nd.NDArray) for factor in factors):
        nd.elemwise_mul(_polynomial(z, tuple(factors), out), z, out=out)
        return _plus(out, constant, out)
    first, second = (*factors, 0.0, 0.0)[:2]
    if isinstance(constant, nd.NDArray):
        return _plus(_polynomial(z, (0.0, *factors), out), constant, out)
    return nd.contrib.quadratic(z, a=second, b=first, c=constant, out=out)


def _compare(name: str, z: nd.NDArray, number: Number, out: nd.NDArray) -> None:
    """Write 1 where the comparison holds, and 0 elsewhere."""
    if isinstance(number, nd.NDArray):
        getattr(nd, f"broadcast_{name}")(z, number.reshape((-1, 1)), out=out)
    else:
        getattr(nd._internal, f"_{name}_scalar")(z, scalar=number, out=out)


def _plus(z: nd.NDArray, number: Number, out: nd.NDArray) -> nd.NDArray:
    """Return the sum, in `out` unless it is z itself."""
    if isinstance(number, nd.NDArray):
        return nd.broadcast_add(z, number.reshape((-1, 1)), out=out)
    return nd._internal._plus_scalar(z, scalar=number, out=out) if number else z
