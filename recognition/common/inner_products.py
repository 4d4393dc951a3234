"""Multiply matrices in numpy's arrays, by the fastest way this CPU has."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Iterable, Iterator

import numpy as np

from dsoftmax.recognition.common.preflight import mxnet, opencv


def inner_products(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterator[np.ndarray]:
    """Yield the inner products of all rows of `a` with all rows of `b`, for each pair (a, b).

    A thread computes them one pair ahead, while the caller works on those it has.

    Parameters
    ----------
    pairs : iterable of ((m, D), (n, D)) float or int8
        Of any sizes. The matrices must not be changed afterwards.

    Yields
    ------
    (m, n) float32
        Its memory is used again as soon as the next one is asked for.

    Examples
    --------
    >>> a, b = np.eye(2), np.array([[1, 2], [3, 4], [5, 6]])
    >>> for products in inner_products([(a, b), (a, 2 * b)]):
    ...     print(products)
    [[1. 3. 5.]
     [2. 4. 6.]]
    [[ 2.  6. 10.]
     [ 4.  8. 12.]]
    """
    mx = mxnet()
    from dsoftmax.recognition.common import products  # late, because it imports MXNet

    # `dot` is OpenBLAS, which numpy has too, and then nothing need be copied.
    multiplier = _ByNumpy if products.way(mx.cpu()) == "dot" else _ByMXNet
    multipliers = itertools.cycle([multiplier(), multiplier()])  # the caller's and the thread's
    pending = following = None
    try:
        for a, b in pairs:
            following = _thread(os.getpid()).submit(next(multipliers).multiply, a, b)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()
    finally:
        if following is not None:  # whoever stops early may change the matrices
            wait([following])


@functools.lru_cache(maxsize=1)
def _thread(process: int) -> ThreadPoolExecutor:
    """Return the thread of this process: MXNet keeps 5 MB for every thread that has used it."""
    return ThreadPoolExecutor(1)


class _ByNumpy:
    """Multiplies with numpy; each product overwrites the last one."""

    def __init__(self):
        self._out = np.empty(0, np.float32)
        self._converted = {"a": np.empty(0, np.float32), "b": np.empty(0, np.float32)}

    def multiply(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        size = len(a) * len(b)
        if size > self._out.size:
            self._out = np.empty(size, np.float32)
        a, b = self._as_float("a", a), self._as_float("b", b)
        return np.matmul(a, b.T, out=self._out[:size].reshape(len(a), len(b)))

    def _as_float(self, side: str, matrix: np.ndarray) -> np.ndarray:
        if matrix.dtype == np.float32:
            return matrix
        if matrix.size > self._converted[side].size:
            self._converted[side] = np.empty(matrix.size, np.float32)
        converted = self._converted[side][: matrix.size].reshape(matrix.shape)
        _convert(matrix, converted)
        return converted


def _convert(matrix: np.ndarray, into: np.ndarray) -> None:
    """Copy numbers of any kind to float32."""
    if matrix.dtype == np.float16 and matrix.size:
        # OpenCV has the processor's instructions for it; numpy takes twenty times as long.
        opencv().convertFp16(np.ascontiguousarray(matrix).view(np.int16), into)
    else:
        into[:] = matrix


class _ByMXNet:
    """Multiplies with MXNet; each product overwrites the last one."""

    def __init__(self):
        self._last_a = self._left = None
        self._a, self._b, self._out = _Memory(), _Memory(), _Memory()
        self._by_numpy = _ByNumpy()

    def multiply(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        from dsoftmax.recognition.common.products import times_transposed

        if not (len(a) and len(b)):
            return np.empty((len(a), len(b)), np.float32)
        if len(a) == 1:  # reading b is the work: a copy would double it
            return self._by_numpy.multiply(a, b)
        if a is not self._last_a:
            self._last_a, self._left = a, self._a.copy_of(a)
        right = self._b.copy_of(b)
        out, products = self._out.reserve((len(a), len(b)))
        times_transposed(self._left, right, out)
        out.wait_to_read()
        return products


class _Memory:
    """Memory that MXNet and numpy share; it grows as needed."""

    def __init__(self):
        self._content = np.empty(0, np.float32)

    def reserve(self, shape: tuple[int, int]):
        """Return an array of MXNet and one of numpy, both of this shape, in the same memory."""
        size = shape[0] * shape[1]
        if size > self._content.size:
            # Flat: oneDNN would change the layout of a whole matrix in place, never that of a part.
            self._array = mxnet().nd.empty(size)
            self._content = np.asarray(_Content(self._array))
        return self._array[:size].reshape(shape), self._content[:size].reshape(shape)

    def copy_of(self, matrix: np.ndarray):
        """Return a copy of a matrix as an array of MXNet."""
        array, content = self.reserve(matrix.shape)
        _convert(matrix, content)
        return array


class _Content:
    """What an MXNet array of float32 on the CPU holds, kept alive for numpy."""

    def __init__(self, array):
        base = mxnet().base
        array.wait_to_read()
        address = ctypes.c_void_p()
        base.check_call(base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
        self._array = array
        self.__array_interface__ = {
            "data": (address.value, False),
            "shape": array.shape,
            "typestr": np.dtype(np.float32).str,
            "version": 3,
        }
