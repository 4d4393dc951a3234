"""Where class weights live: split over devices, each share in its device's memory or in the host's.

A share is a contiguous range of classes, exact for any number of classes and devices. A step that
uses some of the rows reads, writes and updates those alone.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import nd

from dsoftmax.losses.kernels import take_rows

INITIALIZED_AT_ONCE = 1 << 16  # classes
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

    def gather(self, rows: np.ndarray, out: nd.NDArray) -> None:
        """Copy rows of the range to `out`, (n, D) on the device."""
        if self.home == self.device:
            take_rows(self.weight, rows, out)
        else:
            take_rows(self.weight, rows).copyto(out)


class ClassStore:
    """All class weights.

    Parameters
    ----------
    num_classes, width : int
        K and D.
    contexts : list of mx.Context
        The devices that share the classes.
    on_host : bool
        Whether weights are stored in the host's memory, whatever the devices.
    """

    def __init__(self, num_classes: int, width: int, contexts: list[mx.Context], on_host: bool):
        self.shape = (num_classes, width)
        borders = [num_classes * i // len(contexts) for i in range(len(contexts) + 1)]
        self.shards = [
            Shard(start, stop, width, context, mx.cpu(0) if on_host else context)
            for start, stop, context in zip(borders, borders[1:], contexts)
            if stop > start  # fewer classes than devices
        ]
        # The BLAS in MXNet's wheels hangs if two threads multiply matrices at the same time, each
        # on several cores. Contexts of one CPU share its cores, so little is lost by taking turns.
        self.one_at_a_time = sum(shard.device.device_type == "cpu" for shard in self.shards) > 1

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
        stop = start + len(rows)
        for shard in self.shards:
            low, high = max(start, shard.start), min(stop, shard.stop)
            if low < high:
                shard.weight[low - shard.start : high - shard.start] = rows[
                    low - start : high - start
                ]

    def read(self) -> np.ndarray:
        """Return all weights, numpy (K, D)."""
        return np.concatenate([shard.weight.asnumpy() for shard in self.shards])
