"""Multiply vectors in numpy's arrays, by the fastest way this CPU has."""

from __future__ import annotations

import ctypes

import numpy as np

from dsoftmax.recognition.common.preflight import mxnet


class InnerProducts:
    """The inner products of some vectors with others, which come block by block.

    Parameters
    ----------
    vectors : (m, D) float
    most : int
        The largest number of vectors in a block.

    Examples
    --------
    >>> products = InnerProducts(np.eye(2), most=3)
    >>> products(np.array([[1, 2], [3, 4], [5, 6]]))
    array([[1., 3., 5.],
           [2., 4., 6.]], dtype=float32)
    """

    def __init__(self, vectors: np.ndarray, most: int):
        mx = mxnet()
        from dsoftmax.recognition.common import products  # late, because it imports MXNet

        self._vectors = np.ascontiguousarray(vectors, np.float32)
        count, width = self._vectors.shape
        # `dot` is OpenBLAS, which numpy has too, and then nothing need be copied.
        self._is_numpys = products.way(mx.cpu()) == "dot"
        if self._is_numpys:
            self._out = np.empty(count * most, np.float32)
            return
        self._multiply = products.times_transposed
        self._left = mx.nd.array(self._vectors)
        # Flat: oneDNN would change the layout of a whole matrix in place, but never that of a part.
        self._block, self._output = (mx.nd.empty(max(most * size, 1)) for size in (width, count))
        self._in, self._out = (np.asarray(_Memory(part)) for part in (self._block, self._output))

    def __call__(self, others: np.ndarray) -> np.ndarray:
        """Multiply with a block.

        Parameters
        ----------
        others : (n, D) float

        Returns
        -------
        (m, n) float32
            The next call overwrites it.
        """
        count, width = self._vectors.shape
        shape = (count, len(others))
        out = self._out[: count * len(others)].reshape(shape)
        if self._is_numpys:
            return np.matmul(self._vectors, others.astype(np.float32, copy=False).T, out=out)
        if not out.size:
            return out
        self._in[: others.size].reshape(others.shape)[:] = others
        output = self._output[: out.size].reshape(shape)
        self._multiply(self._left, self._block[: others.size].reshape((-1, width)), output)
        output.wait_to_read()
        return out


class _Memory:
    """The memory of an MXNet array of float32 on the CPU, kept alive for numpy."""

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
