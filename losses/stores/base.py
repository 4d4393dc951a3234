"""What every store of class weights offers to the rest of the loss family."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, ClassVar, Iterator, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import nd

from dsoftmax.losses import operators
from dsoftmax.recognition.common.distributed.group import ALONE, Group
from dsoftmax.recognition.common.products import way

if TYPE_CHECKING:
    from dsoftmax.losses.head import Head
    from dsoftmax.losses.trainer import HeadTrainer

WEIGHT = "weight"
FLOAT_BYTES = 4
INITIALIZED_AT_ONCE = 1 << 16  # classes
CARRIED_AT_ONCE = 1 << 14  # classes, between processes


def state_name(place: int) -> str:
    """Return the name of the array that holds the `place`-th state of an optimizer."""
    return f"state{place}"


class StoreMemory(NamedTuple):
    """Bytes that class weights and the states of their optimizer take."""

    device: int = 0  # of one device
    host: int = 0  # of one process
    servers: int = 0  # of all parameter servers together


class Shard:
    """A range of classes that one device computes with.

    Parameters
    ----------
    start, stop : int
        The range.
    device : mx.Context
        Where the products are computed.
    home : mx.Context
        Where `take` and `block` return class rows.

    Attributes
    ----------
    holds_floats : bool
        Whether the rows are a float32 array at `home`, ``weight``.
    """

    holds_floats = False

    def __init__(self, start: int, stop: int, device: mx.Context, home: mx.Context):
        self.start, self.stop = start, stop
        self.device, self.home = device, home

    def __len__(self) -> int:
        return self.stop - self.start

    def owned(self, classes: np.ndarray) -> np.ndarray:
        """Say which of the classes lie in this range, (n,) bool."""
        return (classes >= self.start) & (classes < self.stop)

    def take(self, class_rows: np.ndarray, out: nd.NDArray | None = None) -> nd.NDArray:
        """Return the weights of some classes, (n, D) at `home`.

        Parameters
        ----------
        class_rows : (n,) int64
            Counted from `start`.
        out : (n, D), optional
            Memory to use.
        """
        raise NotImplementedError

    def block(self, start: int, stop: int) -> nd.NDArray:
        """Return the weights of neighbouring classes, (stop - start, D) at `home`."""
        raise NotImplementedError

    def gather(self, class_rows: np.ndarray, out: nd.NDArray) -> None:
        """Copy the weights of some classes to `out`, (n, D) on the device."""
        if self.home == self.device:
            self.take(class_rows, out)
        else:
            self.take(class_rows).copyto(out)


class ClassStore:
    """All class weights and the states of their optimizer, as arrays (rows, D) by name.

    A class has one row, or `subcentres` neighbouring ones, which stay together.

    The weights are ``WEIGHT``, the optimizer's states ``state_name(0)`` and so on. The classes are
    split over the devices of all processes, exactly for any number of either.

    Parameters
    ----------
    num_classes, width : int
        K and D.
    contexts : list of mx.Context
        The devices of this process.
    group : Group
        The processes that share the classes, each with the same number of devices.
    subcentres : int
        Rows of a class.

    Attributes
    ----------
    shape : (int, int)
        Rows and D.
    shards : list of Shard
        Those of this process.
    one_at_a_time : bool
        Whether the devices must take turns.
    needs_sampled_classes : bool
        Whether the store only serves steps that use a sample of the classes.
    largest_shard : int
        The most numbers of a shard. A device whose classes have more gets several shards.
    """

    needs_sampled_classes: ClassVar[bool] = False
    largest_shard: ClassVar[int] = sys.maxsize

    def __init__(
        self,
        num_classes: int,
        width: int,
        contexts: list[mx.Context],
        group: Group = ALONE,
        subcentres: int = 1,
    ):
        self.num_classes = num_classes
        self.subcentres = subcentres
        self.shape = (num_classes * subcentres, width)
        self.group = group
        count = len(contexts) * group.size
        if group.size > 1 and num_classes < count:
            raise ValueError(f"{num_classes} classes can't be shared by {count} devices")
        self._borders = [0]  # of all shards of all processes
        self.shards: list[Shard] = []
        first = len(contexts) * group.rank
        for device in range(count):
            stop = num_classes * (device + 1) // count * subcentres
            for start, border in self._cut(self._borders[-1], stop):
                if 0 <= device - first < len(contexts):
                    self.shards.append(self._make_shard(start, border, contexts[device - first]))
                self._borders.append(border)
        on_cpu = {shard.device for shard in self.shards if shard.device.device_type == "cpu"}
        self.one_at_a_time = len(on_cpu) > 1 and not _may_run_together(on_cpu)
        if len(on_cpu) > 1 and not self.one_at_a_time:
            operators.share_cores(on_cpu)

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cut the classes of a device into as few and as equal shards as possible."""
        each, classes = self.subcentres, (stop - start) // self.subcentres
        most = max(self.largest_shard // (self.shape[1] * each), 1)
        parts = math.ceil(classes / most)
        for part in range(parts):  # none if there are fewer classes than devices
            first, last = (classes * place // parts * each for place in (part, part + 1))
            yield start + first, start + last

    def _make_shard(self, start: int, stop: int, device: mx.Context) -> Shard:
        raise NotImplementedError

    def take_turns(self) -> None:
        """Wait for one device's products before another one's, if they must take turns."""
        if self.one_at_a_time:
            nd.waitall()

    @classmethod
    def memory(
        cls, num_classes: int, width: int, devices: int, processes: int, copies: int
    ) -> StoreMemory:
        """Estimate the memory of a store before it exists.

        Parameters
        ----------
        num_classes, width : int
            K and D.
        devices, processes : int
            How many share the classes; devices are counted over all processes.
        copies : int
            Arrays (K, D): the weights, and one per state of the optimizer.
        """
        raise NotImplementedError

    def initialize(self, initializer: mx.init.Initializer, seed: int) -> None:
        """Draw all weights anew; the result depends on the seed alone, not on the split."""
        raise NotImplementedError

    def _draw_weights(
        self, initializer: mx.init.Initializer, seed: int
    ) -> Iterator[tuple[int, nd.NDArray]]:
        """Yield new weights, (some, D) on the CPU, each block with its first class."""
        mx.random.seed(seed, ctx=mx.cpu(0))
        description = mx.init.InitDesc("class_weight")
        for start in range(0, self.shape[0], INITIALIZED_AT_ONCE):
            stop = min(start + INITIALIZED_AT_ONCE, self.shape[0])
            block = nd.empty((stop - start, self.shape[1]), ctx=mx.cpu(0))
            initializer(description, block)
            yield start, block

    def blocks(self, name: str = WEIGHT) -> Iterator[np.ndarray]:
        """Yield an array, numpy (some, D) per block, from class 0 on.

        All processes must read at the same time; one that needs no data calls `assist_reading`.
        """
        raise NotImplementedError

    def assist_reading(self, name: str = WEIGHT) -> None:
        """Do this process's part while another one reads `blocks`."""
        raise NotImplementedError

    def read(self, name: str = WEIGHT) -> np.ndarray:
        """Return an array, numpy (K, D); all processes must call it."""
        return np.concatenate(list(self.blocks(name)))

    def fill(self, rows: np.ndarray | None, name: str = WEIGHT) -> None:
        """Set an array from the first process's rows, (K, D); all processes must call it.

        The other processes may give None.
        """
        raise NotImplementedError

    def make_trainer(self, head: Head, optimizer: Any, optimizer_params: dict) -> HeadTrainer:
        """Make the trainer that updates this store's weights."""
        raise NotImplementedError

    def all_finite(self) -> bool:
        """Say whether the weights of this process hold neither NaN nor infinity."""
        raise NotImplementedError

    def describe(self) -> str:
        """Say where the weights live, and where they are computed with."""
        where = ", ".join(dict.fromkeys(map(self._describe_shard, self.shards)))
        if self.group.size > 1:
            where += f" and those of {self.group.size - 1} more processes"
        return where

    def _describe_shard(self, shard: Shard) -> str:
        return str(shard.device)


def _may_run_together(contexts: list[mx.Context]) -> bool:
    """Say whether contexts of one CPU may compute at the same time.

    OpenBLAS in MXNet's wheels hangs if two threads multiply matrices at the same time, each on
    several cores; without the compiled operators a step needs it even beside oneDNN.
    """
    return all(way(cpu) == "onednn" and operators.serve(cpu) for cpu in contexts)
