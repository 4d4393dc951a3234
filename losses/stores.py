"""Where class weights live: split over devices, each share in its device's memory or in the host's.

A share is a contiguous range of classes, exact for any number of classes and devices. A step that
uses some of the rows reads, writes and updates those alone.
"""

from __future__ import annotations

from typing import Iterator

import mxnet as mx
import numpy as np
from mxnet import nd

from dsoftmax.losses.kernels import take_rows
from dsoftmax.recognition.common.distributed.group import ALONE, Group

INITIALIZED_AT_ONCE = 1 << 16  # classes
CARRIED_AT_ONCE = 1 << 14  # classes, between processes
LARGEST_ARRAY = (1 << 31) - 1  # elements MXNet 1.9.1 can index


class Shard:
    """A range of classes: their weights, where these are stored and where they are computed with.

    Parameters
    ----------
    start, stop : int
        The range.
    width : int
        D.
    device : mx.Context
        Where the products are computed.
    home : mx.Context
        Where the weights are stored.
    """

    def __init__(self, start: int, stop: int, width: int, device: mx.Context, home: mx.Context):
        if (stop - start) * width > LARGEST_ARRAY:
            raise ValueError(
                f"{stop - start} classes of width {width} are more than an array of MXNet holds "
                f"({LARGEST_ARRAY} numbers): split them over more contexts"
            )
        self.start, self.stop = start, stop
        self.device, self.home = device, home
        self.weight = nd.zeros((stop - start, width), ctx=home)

    def __len__(self) -> int:
        return self.stop - self.start

    def owned(self, classes: np.ndarray) -> np.ndarray:
        """Say which of the classes lie in this range, (n,) bool."""
        return (classes >= self.start) & (classes < self.stop)

    def is_finite(self) -> bool:
        """Say whether all weights are numbers."""
        return bool(np.isfinite(self.weight.asnumpy()).all())

    def take(self, rows: np.ndarray, out: nd.NDArray | None = None) -> nd.NDArray:
        """Return rows of the range, (n, D) where they are stored."""
        return take_rows(self.weight, rows, out)

    def block(self, start: int, stop: int) -> nd.NDArray:
        """Return neighbouring rows of the range, (stop - start, D) where they are stored."""
        return self.weight[start:stop]

    def gather(self, rows: np.ndarray, out: nd.NDArray) -> None:
        """Copy rows of the range to `out`, (n, D) on the device."""
        if self.home == self.device:
            self.take(rows, out)
        else:
            self.take(rows).copyto(out)


class ClassStore:
    """All class weights.

    Parameters
    ----------
    num_classes, width : int
        K and D.
    contexts : list of mx.Context
        The devices of this process that share the classes.
    on_host : bool
        Whether weights are stored in the host's memory, whatever the devices.
    group : Group
        The processes that share the classes, each with as many devices.

    Attributes
    ----------
    shards : list of Shard
        Those of this process.
    reads_together : bool
        Whether all processes must read `blocks` at the same time.
    """

    reads_together = True

    def __init__(
        self,
        num_classes: int,
        width: int,
        contexts: list[mx.Context],
        on_host: bool,
        group: Group = ALONE,
    ):
        self.shape = (num_classes, width)
        self.group = group
        count = len(contexts) * group.size
        if group.size > 1 and num_classes < count:
            raise ValueError(f"{num_classes} classes can't be shared by {count} devices")
        self._borders = [num_classes * i // count for i in range(count + 1)]
        first = len(contexts) * group.rank
        self.shards = [
            self._make_shard(start, stop, context, on_host)
            for start, stop, context in zip(
                self._borders[first:], self._borders[first + 1 :], contexts
            )
            if stop > start  # fewer classes than devices
        ]
        # The BLAS in MXNet's wheels hangs if two threads multiply matrices at the same time, each
        # on several cores. Contexts of one CPU share its cores, so little is lost by taking turns.
        self.one_at_a_time = sum(shard.device.device_type == "cpu" for shard in self.shards) > 1

    def _make_shard(self, start: int, stop: int, device: mx.Context, on_host: bool) -> Shard:
        return Shard(start, stop, self.shape[1], device, mx.cpu(0) if on_host else device)

    def initialize(self, initializer: mx.init.Initializer, seed: int) -> None:
        """Draw all weights anew: the same ones for a seed, however they are split."""
        mx.random.seed(seed, ctx=mx.cpu(0))
        description = mx.init.InitDesc("class_weight")
        for start in range(0, self.shape[0], INITIALIZED_AT_ONCE):
            stop = min(start + INITIALIZED_AT_ONCE, self.shape[0])
            block = nd.empty((stop - start, self.shape[1]), ctx=mx.cpu(0))
            initializer(description, block)
            self.write(start, block)

    def write(self, start: int, rows: nd.NDArray | np.ndarray) -> None:
        """Set the weights of the classes from `start` on."""
        self._write_parts([shard.weight for shard in self.shards], start, rows)

    def read(self) -> np.ndarray:
        """Return all weights, numpy (K, D)."""
        return np.concatenate(list(self.blocks()))

    def blocks(self, parts: list[nd.NDArray] | None = None) -> Iterator[np.ndarray]:
        """Yield the weights of all classes, numpy (some, D), from class 0 on, in every process.

        Parameters
        ----------
        parts : list of (classes, D)
            What to read instead of the weights: an array for each shard of this process.
        """
        parts = [shard.weight for shard in self.shards] if parts is None else parts
        for start, stop in self._ranges():
            block = None
            for shard, part in zip(self.shards, parts):
                if shard.start <= start and stop <= shard.stop:
                    block = part[start - shard.start : stop - shard.start].as_in_context(mx.cpu(0))
            if self.group.size > 1:
                if block is None:
                    block = nd.zeros((stop - start, self.shape[1]), ctx=mx.cpu(0))
                block = self.group.sum("block of classes", block.copy())
            yield block.asnumpy()

    def fill(self, rows: np.ndarray | None, parts: list[nd.NDArray] | None = None) -> None:
        """Set the weights of all classes, or `parts` as of `blocks`, from the first process's rows.

        Parameters
        ----------
        rows : (K, D)
            The other processes may have None.
        parts : list of (classes, D)
        """
        parts = [shard.weight for shard in self.shards] if parts is None else parts
        if self.group.size == 1:
            self._write_parts(parts, 0, rows)
            return
        for start, stop in self._ranges():
            block = nd.zeros((stop - start, self.shape[1]), ctx=mx.cpu(0))
            if self.group.is_first:
                block[:] = rows[start:stop]
            self._write_parts(parts, start, self.group.sum("block of classes", block))

    def _write_parts(self, parts: list[nd.NDArray], start: int, rows) -> None:
        stop = start + len(rows)
        for shard, part in zip(self.shards, parts):
            low, high = max(start, shard.start), min(stop, shard.stop)
            if low < high:
                part[low - shard.start : high - shard.start] = rows[low - start : high - start]

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Cut the classes into ranges, none of which is in two shards."""
        for low, high in zip(self._borders, self._borders[1:]):
            for start in range(low, high, CARRIED_AT_ONCE):
                yield start, min(start + CARRIED_AT_ONCE, high)
