"""Rows of 2-byte numbers: how they are read, and how an update rounds them.

MXNet computes with float16 on few devices and with bfloat16 on fewer. Here both are formats to keep
numbers in: a step turns the rows it uses into float32, and the update rounds its float32 result to
one of the two neighbours at random, so that the mean of the result is exact. Rounding to the
nearest would lose every update smaller than half the distance of neighbours, 1/4096 of a float16.

What is drawn is a function of (seed, step, class, column). To MXNet the arrays are float16,
whatever their bits mean. Where the operators are not built, NumPy does the same, to the bit.
"""

from __future__ import annotations

import ctypes
import math
from typing import ClassVar

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.base import _LIB, check_call

from dsoftmax.losses import operators
from dsoftmax.losses.kernels import RowGradient, Sgd, from_numpy

HALF_BYTES = 2
CARRIER = "float16"  # the type of the arrays to MXNet
UPDATED_AT_ONCE = 1 << 14  # numbers, by NumPy: more leave the processor's cache
GOLDEN = np.uint32(0x9E3779B9)  # between the columns of a row

_INFINITY = np.uint32(0x7F800000)  # as float32
_SIZE = np.uint32(0x7FFFFFFF)  # all bits but the sign


class Half:
    """A format of 2-byte numbers, as NumPy arrays of uint16."""

    name: ClassVar[str]
    largest: ClassVar[float]

    @staticmethod
    def decode(halves: np.ndarray) -> np.ndarray:
        """Return the numbers as float32, which holds each of them exactly."""
        raise NotImplementedError

    @staticmethod
    def encode(values: np.ndarray) -> np.ndarray:
        """Round float32 numbers to the nearest ones."""
        raise NotImplementedError

    @staticmethod
    def round(values: np.ndarray, random: np.ndarray) -> np.ndarray:
        """Round float32 numbers to either neighbour, by a random uint32 each."""
        raise NotImplementedError


class Float16(Half):
    """Eleven significant bits, from 6e-8 to 65504."""

    name = "float16"
    largest = 65504.0

    @staticmethod
    def decode(halves: np.ndarray) -> np.ndarray:
        """Return the numbers as float32, which holds each of them exactly."""
        return halves.view(np.float16).astype(np.float32)

    @staticmethod
    def encode(values: np.ndarray) -> np.ndarray:
        """Round float32 numbers to the nearest ones."""
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)

    @staticmethod
    def round(values: np.ndarray, random: np.ndarray) -> np.ndarray:
        """Round float32 numbers to either neighbour, by a random uint32 each."""
        bits = values.view(np.uint32)
        size = bits & _SIZE
        half = ((size + (random & np.uint32(0x1FFF))) >> np.uint32(13)) - np.uint32(112 << 10)
        # Below 2^-14 the distance of neighbours is 2^-24, so that more bits are dropped.
        below = np.maximum(113 - (size >> np.uint32(23)).astype(np.int32), 0).astype(np.uint32)
        excess = np.minimum(np.maximum(below, 18) - np.uint32(18), 31)
        whole = ((size & np.uint32(0x7FFFFF)) | np.uint32(0x800000)) >> excess
        drop = np.uint32(13) + np.minimum(below, np.uint32(18))
        small = (whole + (random & ((np.uint32(1) << drop) - np.uint32(1)))) >> drop
        half = np.minimum(np.where(below > 0, small, half), np.uint32(0x7C00))
        half[size > _INFINITY] = 0x7E00
        half[size == _INFINITY] = 0x7C00
        return (half | (bits >> np.uint32(16) & np.uint32(0x8000))).astype(np.uint16)


class BFloat16(Half):
    """The upper half of a float32: eight significant bits, the range of float32."""

    name = "bfloat16"
    largest = float(np.uint32(0x7F7F0000).view(np.float32))

    @staticmethod
    def decode(halves: np.ndarray) -> np.ndarray:
        """Return the numbers as float32, which holds each of them exactly."""
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)

    @staticmethod
    def encode(values: np.ndarray) -> np.ndarray:
        """Round float32 numbers to the nearest ones."""
        is_odd = values.view(np.uint32) >> np.uint32(16) & np.uint32(1)
        return BFloat16.round(values, np.uint32(0x7FFF) + is_odd)

    @staticmethod
    def round(values: np.ndarray, random: np.ndarray) -> np.ndarray:
        """Round float32 numbers to either neighbour, by a random uint32 each."""
        bits = values.view(np.uint32)
        size = bits & _SIZE
        half = (bits + (random & np.uint32(0xFFFF))) >> np.uint32(16)
        other = bits >> np.uint32(16) | np.where(size > _INFINITY, np.uint32(0x40), np.uint32(0))
        return np.where(size >= _INFINITY, other, half).astype(np.uint16)


def make_rows(count: int, width: int, context: mx.Context) -> nd.NDArray:
    """Return an array of zeros in any of the formats, (count, width)."""
    return nd.zeros((count, width), ctx=context, dtype=CARRIER)


def memory_of(array: nd.NDArray) -> np.ndarray:
    """Return the memory of an array on the CPU as uint16, once nothing queued uses it.

    Valid only as long as the array itself lives.
    """
    check_call(_LIB.MXNDArrayWaitToWrite(array.handle))
    memory = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(memory)))
    size = HALF_BYTES * math.prod(array.shape)
    buffer = (ctypes.c_uint8 * size).from_address(memory.value)
    return np.ndarray(array.shape, np.uint16, buffer)


def take_half_rows(
    matrix: nd.NDArray, rows: np.ndarray, half: type[Half], out: nd.NDArray | None = None
) -> nd.NDArray:
    """Return rows of 2-byte numbers as float32, (n, D), where the matrix is.

    Parameters
    ----------
    matrix : (K, D)
    rows : (n,) integers
    half : type of Half
        The format of the matrix.
    out : (n, D), optional
        Memory to use.
    """
    if operators.serve(matrix.context):
        if out is None:
            out = operators.output(matrix.context, len(rows), matrix.shape[1])
        index = from_numpy(rows, matrix.context)
        operators.queue(f"{half.name}_take", [out], [index, matrix])
        return out
    taken = from_numpy(half.decode(memory_of(matrix)[rows]), matrix.context, "float32")
    return taken if out is None else taken.copyto(out)


def row_keys(seed: int, step: int, classes: np.ndarray) -> np.ndarray:
    """Return the keys of an update's random numbers, (2, n) uint32: of weights and of states.

    Parameters
    ----------
    seed, step : int
    classes : (n,) int64
        Counted over all shards.
    """
    key = _mix_64(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
    key = _mix_64(key ^ np.uint64(step))
    of_arrays = 2 * classes.astype(np.uint64) + np.arange(2, dtype=np.uint64)[:, None]
    return (_mix_64(key ^ of_arrays) >> np.uint64(32)).astype(np.uint32)


def random_numbers(keys: np.ndarray, width: int) -> np.ndarray:
    """Return a random uint32 per column of each key, (n, width)."""
    x = keys[:, None] + np.arange(width, dtype=np.uint32) * GOLDEN
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)  # lowbias32, found by Chris Wellons
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


def _mix_64(x: np.ndarray) -> np.ndarray:
    """Mix all bits of each number, as splitmix64 does."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def update_half_rows(
    sgd: Sgd,
    half: type[Half],
    weight: nd.NDArray,
    state: nd.NDArray | None,
    rows: np.ndarray,
    keys: np.ndarray,
    gradient: RowGradient,
) -> None:
    """Update rows of the weights and, where there is momentum, of the state, in place.

    Parameters
    ----------
    sgd : Sgd
    half : type of Half
        The format of weights and state.
    weight, state : (K, D)
    rows : (n,)
        Distinct.
    keys : (2, n) uint32
        As returned by `row_keys`.
    gradient : RowGradient
        Of these rows, on the weights' context.
    """
    if not operators.serve(weight.context):
        _update_by_numpy(sgd, half, weight, state, rows, keys, gradient)
        return
    context, along = weight.context, gradient.along
    along = nd.zeros((len(rows), 1), ctx=context) if along is None else along
    read = [gradient.values, along, from_numpy(rows, context)]
    operators.queue(
        f"{half.name}_sgd",
        [weight] if state is None else [weight, state],
        [*read, from_numpy(keys.view(np.int32), context)],
        sgd.numbers(),
    )


def _update_by_numpy(
    sgd: Sgd,
    half: type[Half],
    weight: nd.NDArray,
    state: nd.NDArray | None,
    rows: np.ndarray,
    keys: np.ndarray,
    gradient: RowGradient,
) -> None:
    lr, momentum, wd, rescale, clip = map(np.float32, sgd.numbers())
    values, along = gradient.values.asnumpy(), gradient.along
    along = None if along is None else along.asnumpy()
    weights, states = memory_of(weight), None if state is None else memory_of(state)
    width = weights.shape[1]
    at_once = max(UPDATED_AT_ONCE // width, 1)
    for start in range(0, len(rows), at_once):
        block = slice(start, start + at_once)
        places = rows[block]
        w, g = half.decode(weights[places]), values[block]
        if along is not None:
            g = g - along[block] * w
        g = np.clip(rescale * g, -clip, clip) + wd * w
        if states is None:
            w = w - lr * g
        else:
            moved = momentum * half.decode(states[places]) - lr * g
            states[places] = half.round(moved, random_numbers(keys[1, block], width))
            w = w + moved
        weights[places] = half.round(w, random_numbers(keys[0, block], width))
