"""Class weights in the memory of the process: on its devices, or in the host's."""

from __future__ import annotations

from typing import Any, ClassVar, Iterator

import mxnet as mx
import numpy as np
from mxnet import nd

from dsoftmax.losses.kernels import take_rows
from dsoftmax.losses.stores.base import (
    CARRIED_AT_ONCE,
    FLOAT_BYTES,
    WEIGHT,
    ClassStore,
    Shard,
    StoreMemory,
)
from dsoftmax.losses.trainer import HeadTrainer
from dsoftmax.recognition.common.distributed.group import ALONE, Group
from dsoftmax.recognition.common.distributed.heartbeat import beat
from dsoftmax.recognition.common.memory import available_bytes

LARGEST_ARRAY = (1 << 31) - 1  # elements MXNet 1.9.1 can index


class LocalShard(Shard):
    """A range of classes whose weights are one array of this process.

    Parameters
    ----------
    start, stop : int
        The range.
    width : int
        D.
    device, home : mx.Context
        Where the products are computed, and where the weights are stored.

    Attributes
    ----------
    weight : (stop - start, D)
    """

    dtype: ClassVar[str] = "float32"  # of the weights, to MXNet

    def __init__(self, start: int, stop: int, width: int, device: mx.Context, home: mx.Context):
        super().__init__(start, stop, device, home)
        self.weight = nd.zeros((stop - start, width), ctx=home, dtype=self.dtype)
        self.holds_floats = self.dtype == "float32"

    def take(self, class_rows: np.ndarray, out: nd.NDArray | None = None) -> nd.NDArray:
        """Return the weights of some classes, (n, D) where they are stored."""
        return take_rows(self.weight, class_rows, out)

    def block(self, start: int, stop: int) -> nd.NDArray:
        """Return the weights of neighbouring classes, (stop - start, D) where they are stored."""
        return self.weight[start:stop]


class LocalStore(ClassStore):
    """Class weights in arrays of this process, one per shard."""

    largest_shard = LARGEST_ARRAY

    def __init__(
        self,
        num_classes: int,
        width: int,
        contexts: list[mx.Context],
        group: Group = ALONE,
        subcentres: int = 1,
    ):
        self._check_room(num_classes * subcentres, width, contexts, group)
        super().__init__(num_classes, width, contexts, group, subcentres)
        self._arrays = {WEIGHT: [shard.weight for shard in self.shards]}

    def _check_room(
        self, num_classes: int, width: int, contexts: list[mx.Context], group: Group
    ) -> None:
        """Refuse weights that don't fit, before MXNet fails or the system ends the process."""
        devices = len(contexts) * group.size
        needed = self.memory(num_classes, width, devices, group.size, copies=1)
        on_cpus = sum(context.device_type == "cpu" for context in contexts)
        here, free = needed.host + on_cpus * needed.device, available_bytes()
        if here > free:
            raise ValueError(
                f"{num_classes} class weights of width {width} need {here / 1e9:.1f} GB in the "
                f"host's memory, where {free / 1e9:.1f} GB are free"
            )

    def keep(self, name: str, parts: list[nd.NDArray]) -> None:
        """Take up another array, (classes, D) per shard, to be read and written by its name."""
        self._arrays[name] = parts

    def initialize(self, initializer: mx.init.Initializer, seed: int) -> None:
        """Draw all weights anew; the result depends on the seed alone, not on the split."""
        for start, block in self._draw_weights(initializer, seed):
            self._write(WEIGHT, start, block)

    def blocks(self, name: str = WEIGHT) -> Iterator[np.ndarray]:
        """Yield an array, numpy (some, D) per block, from class 0 on, in every process."""
        for start, stop in self._ranges():
            block = None
            for shard, part in zip(self.shards, self._arrays[name]):
                if shard.start <= start and stop <= shard.stop:
                    block = self._read_rows(part, start - shard.start, stop - shard.start)
            if self.group.size > 1:
                if block is None:
                    block = nd.zeros((stop - start, self.shape[1]), ctx=mx.cpu(0))
                block = self.group.sum("block of classes", block.copy())
            yield block.asnumpy()
            beat()

    def assist_reading(self, name: str = WEIGHT) -> None:
        """Send this process's classes to the one that reads `blocks`."""
        for _ in self.blocks(name):
            pass

    def fill(self, rows: np.ndarray | None, name: str = WEIGHT) -> None:
        """Set an array from the first process's rows, (K, D); all processes must call it."""
        if self.group.size == 1:
            self._write(name, 0, rows)
            return
        for start, stop in self._ranges():
            block = nd.zeros((stop - start, self.shape[1]), ctx=mx.cpu(0))
            if self.group.is_first:
                block[:] = rows[start:stop]
            self._write(name, start, self.group.sum("block of classes", block))
            beat()

    def _write(self, name: str, start: int, rows: nd.NDArray | np.ndarray) -> None:
        """Set the rows of the classes from `start` on."""
        stop = start + len(rows)
        for shard, part in zip(self.shards, self._arrays[name]):
            low, high = max(start, shard.start), min(stop, shard.stop)
            if low < high:
                self._write_rows(part, low - shard.start, rows[low - start : high - start])

    def _read_rows(self, part: nd.NDArray, start: int, stop: int) -> nd.NDArray:
        """Return rows of an array, float32 on the CPU."""
        return part[start:stop].as_in_context(mx.cpu(0))

    def _write_rows(self, part: nd.NDArray, start: int, rows: nd.NDArray | np.ndarray) -> None:
        """Set rows of an array from `start` on."""
        part[start : start + len(rows)] = rows

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Cut the classes into ranges, none of which is in two shards."""
        for low, high in zip(self._borders, self._borders[1:]):
            for start in range(low, high, CARRIED_AT_ONCE):
                yield start, min(start + CARRIED_AT_ONCE, high)

    def make_trainer(self, head: Any, optimizer: Any, optimizer_params: dict) -> HeadTrainer:
        """Make the trainer that updates the weights in this process."""
        return HeadTrainer(head, optimizer, optimizer_params)

    def all_finite(self) -> bool:
        """Say whether the weights of this process hold neither NaN nor infinity."""
        return all(
            bool(
                np.isfinite(
                    shard.block(start, min(start + CARRIED_AT_ONCE, len(shard))).asnumpy()
                ).all()
            )
            for shard in self.shards
            for start in range(0, len(shard), CARRIED_AT_ONCE)
        )


class DeviceStore(LocalStore):
    """Class weights in the memory of the devices that compute with them."""

    def _make_shard(self, start: int, stop: int, device: mx.Context) -> LocalShard:
        return LocalShard(start, stop, self.shape[1], device, device)

    @classmethod
    def memory(
        cls, num_classes: int, width: int, devices: int, processes: int, copies: int
    ) -> StoreMemory:
        """Estimate the memory of a store before it exists."""
        classes = -(-num_classes // devices)
        return StoreMemory(device=FLOAT_BYTES * copies * classes * width)


class HostStore(LocalStore):
    """Class weights in the host's memory; a step copies the class rows it uses to the devices."""

    needs_sampled_classes = True

    def _make_shard(self, start: int, stop: int, device: mx.Context) -> LocalShard:
        return LocalShard(start, stop, self.shape[1], device, mx.cpu(0))

    @classmethod
    def memory(
        cls, num_classes: int, width: int, devices: int, processes: int, copies: int
    ) -> StoreMemory:
        """Estimate the memory of a store before it exists."""
        classes = -(-num_classes // processes)
        return StoreMemory(host=FLOAT_BYTES * copies * classes * width)

    def _describe_shard(self, shard: Shard) -> str:
        if shard.home == shard.device:
            return str(shard.device)
        return f"{shard.device} from {shard.home}"
