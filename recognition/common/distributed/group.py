"""What the processes of a group exchange while they train one model.

Each process has a part of the batch and of the classes. Everything they exchange is a sum or a
gather of float32 arrays, so an engine only has to offer `sum_arrays`.
"""

from __future__ import annotations

import json
import math
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import nd


class Group:
    """A group of one process, which exchanges nothing.

    A subclass connects several processes. All of them must call the same methods, with the same
    names and shapes, in the same order.

    Attributes
    ----------
    rank, size : int
        The number of this process, and how many there are. Process 0 reads and writes files.
    is_open : bool
        Whether the others still depend on this process: it must `close` before it may exit with 0.
    """

    rank = 0
    size = 1
    is_open = False

    @property
    def is_first(self) -> bool:
        """Whether this is the process that reads and writes files."""
        return self.rank == 0

    def sum_arrays(self, name: str, arrays: list[nd.NDArray]) -> list[nd.NDArray]:
        """Return the sums over all processes of some arrays, each on its array's context.

        The arrays given may be overwritten.
        """
        return arrays

    def sum(self, name: str, array: nd.NDArray) -> nd.NDArray:
        """Return the sum of an array over all processes."""
        return self.sum_arrays(name, [array])[0]

    def sum_numpy(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return the sum of an array whose size may differ from call to call."""
        if self.size == 1:
            return array
        # Engines keep memory for each size, so round the size up to a power of two.
        padded = np.zeros(1 << max(array.size - 1, 0).bit_length(), np.float32)
        padded[: array.size] = array.reshape(-1)
        total = self.sum(name, nd.array(padded, ctx=mx.cpu())).asnumpy()
        return total[: array.size].reshape(array.shape).astype(array.dtype)

    def gather(self, name: str, array: nd.NDArray) -> nd.NDArray:
        """Return the arrays (n, ...) of all processes, one below the other: (size * n, ...)."""
        if self.size == 1:
            return array
        count = len(array)
        whole = nd.zeros((self.size * count, *array.shape[1:]), ctx=array.context)
        whole[self.rank * count : (self.rank + 1) * count] = array
        return self.sum(name, whole)

    def gather_integers(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return the int64 values (n,) of all processes, exactly: (size * n,)."""
        if self.size == 1:
            return values
        digits = np.ascontiguousarray(values, np.int64).view(np.uint16).astype(np.float32)
        gathered = self.gather(name, nd.array(digits, ctx=mx.cpu()))
        return gathered.asnumpy().astype(np.uint16).view(np.int64)

    def gather_json(self, name: str, content: Any) -> list[Any]:
        """Return the content that each process gives, which JSON must be able to hold."""
        if self.size == 1:
            return [content]
        text = np.frombuffer(json.dumps(content).encode(), np.uint8)
        length = int(self.gather_integers(f"{name} length", np.array([len(text)])).max())
        texts = np.zeros((self.size, length), np.uint8)
        texts[self.rank] = ord(" ")
        texts[self.rank, : len(text)] = text
        return [json.loads(line.tobytes()) for line in self.sum_numpy(name, texts)]

    def broadcast(self, name: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the first process's arrays, of any types and shapes."""
        if self.size == 1:
            return arrays
        described = {key: (array.dtype.str, array.shape) for key, array in arrays.items()}
        received = {}
        for key, (dtype, shape) in self.gather_json(f"{name} shapes", described)[0].items():
            count = math.prod(shape) * np.dtype(dtype).itemsize
            if self.is_first:
                content = np.frombuffer(arrays[key].tobytes(), np.uint8)
            else:
                content = np.zeros(count, np.uint8)
            received[key] = self.sum_numpy(name, content).view(dtype).reshape(shape)
        return received

    def close(self) -> None:
        """Leave the group together with all others."""


ALONE = Group()
