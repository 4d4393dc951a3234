"""Arrays on MXNet's parameter servers, of which workers read and change some rows at a time.

Rows are split over keys of less than 2^31 bytes, and by MXNet over the servers.

This module keeps the rules that MXNet does not enforce: rows are pushed sorted, distinct and within
their key; all workers push each key once per step; a key is used again only after everything sent
and requested before has arrived, because MXNet keeps no order between the two; nothing is pending
when the servers are given new orders.
"""

from __future__ import annotations

import contextlib
from typing import Callable, Iterator

import numpy as np
from mxnet import nd

from dsoftmax.recognition.common.distributed.heartbeat import beat
from dsoftmax.recognition.common.distributed.parameter_server.keys import (
    LARGEST_KEY,
    momenta_key,
    weights_key,
)
from dsoftmax.recognition.common.distributed.parameter_server.worker import ServerGroup

Key = Callable[[int], int]  # `weights_key` or `momenta_key`
NO_ROWS = np.empty(0, np.int64)


class ServerRows:
    """An array (K, D) of weights and one of their momenta, in the memory of the servers.

    Parameters
    ----------
    count, width : int
        K and D.
    group : ServerGroup
    """

    def __init__(self, count: int, width: int, group: ServerGroup):
        self.shape = (count, width)
        self._group = group
        self._has_pushed = self._has_pulled = False  # since everything has arrived
        rows_per_key = LARGEST_KEY // (4 * width)
        self._key_borders = [*range(0, count, rows_per_key), count]
        self._first_range = group.ranges_of_classes
        group.ranges_of_classes += len(self._key_borders) - 1
        for number, start, stop in self._key_ranges():
            for key in (weights_key(number), momenta_key(number)):
                self._create(key, stop - start)
            # The servers learn about the array of momenta from an empty push.
            self._push_rows(momenta_key(number), stop - start, NO_ROWS, None)
        group.barrier()

    def _create(self, key: int, count: int) -> None:
        shape = (count, self.shape[1])
        if self._group.kv.rank:  # MXNet only looks at the array of its first worker
            array = nd.sparse.zeros("row_sparse", shape)
        else:
            rows = nd.arange(count, dtype="int64")
            array = nd.sparse.row_sparse_array((nd.zeros(shape), rows), shape=shape)
        self._group.kv.init(key, array)

    def _key_ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield the number of each range of rows that has keys, its first row and its end."""
        for place, (start, stop) in enumerate(zip(self._key_borders, self._key_borders[1:])):
            yield self._first_range + place, start, stop

    def pull(self, rows: np.ndarray, key: Key = weights_key) -> nd.NDArray:
        """Return some rows, sorted and distinct: (n, D) on the CPU.

        It waits for the last push alone. The rows arrive later, like the result of any operator.
        """
        self._check(rows)
        if self._has_pushed:
            self._settle()
        self._has_pulled = True
        parts = []
        for number, first, last in self._key_ranges():
            low, high = np.searchsorted(rows, (first, last))
            if low == high:
                continue
            pulled = nd.sparse.zeros("row_sparse", (last - first, self.shape[1]))
            index = nd.from_numpy(rows[low:high] - first, zero_copy=False)
            self._group.kv.row_sparse_pull(key(number), out=pulled, row_ids=index)
            # Not `pulled.data`, which waits for the rows.
            parts.append(nd.Embedding(index, pulled, *pulled.shape))
        if not parts:
            return nd.zeros((0, self.shape[1]))
        return parts[0] if len(parts) == 1 else nd.concat(*parts, dim=0)

    def push(self, rows: np.ndarray, gradients: nd.NDArray | None) -> None:
        """Send the gradients (n, D) of some rows, sorted and distinct.

        All workers must call it for each update, without rows if they have none.
        """
        self._check(rows)
        self._settle()  # a pull, too: that of an update which was given up is still on its way
        for number, first, last in self._key_ranges():
            low, high = np.searchsorted(rows, (first, last))
            values = None if low == high else gradients[low:high]
            self._push_rows(weights_key(number), last - first, rows[low:high] - first, values)

    @contextlib.contextmanager
    def assigning(self) -> Iterator[None]:
        """Have the servers take what is pushed as new values instead of gradients."""
        for is_assigning in (True, False):
            self._group.barrier()
            if self._group.is_first:
                self._group.tell_servers({"assigning": is_assigning})
            self._group.barrier()
            if is_assigning:
                yield

    def assign(self, start: int, stop: int, values, key: Key = weights_key) -> None:
        """Set the rows from `start` to `stop` to the first worker's values, while `assigning`.

        Parameters
        ----------
        start, stop : int
        values : (stop - start, D) NDArray or numpy array
            The other workers may give None.
        key : callable
        """
        self._settle()
        beat()
        for number, first, last in self._key_ranges():
            low, high = max(start, first), min(stop, last)
            if low >= high:
                continue
            part, rows = None, NO_ROWS
            if self._group.is_first:
                part = values[low - start : high - start]
                part = part if isinstance(part, nd.NDArray) else nd.array(part)
                rows = np.arange(low - first, high - first)
            self._push_rows(key(number), last - first, rows, part)

    def _settle(self) -> None:
        """Wait until everything that was pushed or pulled has arrived."""
        if self._has_pushed or self._has_pulled:
            nd.waitall()
            self._has_pushed = self._has_pulled = False

    def _check(self, rows: np.ndarray) -> None:
        """Refuse rows that would crash the servers, or that they would drop silently."""
        if (np.diff(rows) <= 0).any():
            raise ValueError("rows must be sorted and distinct")
        if len(rows) and not 0 <= rows[0] <= rows[-1] < self.shape[0]:
            raise ValueError(
                f"rows {rows[0]} to {rows[-1]} are not within 0 to {self.shape[0] - 1}"
            )

    def _push_rows(self, key: int, count: int, rows: np.ndarray, values) -> None:
        shape = (count, self.shape[1])
        if len(rows):
            index = nd.from_numpy(rows, zero_copy=False)
            array = nd.sparse.row_sparse_array((values, index), shape=shape)
        else:
            array = nd.sparse.zeros("row_sparse", shape)
        self._group.kv.push(key, array)
        self._has_pushed = True
