"""Class weights and momenta in the host's memory as 2-byte numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import mxnet as mx
import numpy as np
from mxnet import nd

from dsoftmax.losses.half_rows import (
    CARRIER,
    HALF_BYTES,
    BFloat16,
    Float16,
    Half,
    memory_of,
    row_keys,
    take_half_rows,
    update_half_rows,
)
from dsoftmax.losses.kernels import RowGradient, from_numpy
from dsoftmax.losses.stores.base import CARRIED_AT_ONCE, FLOAT_BYTES, StoreMemory
from dsoftmax.losses.stores.local import HostStore, LocalShard
from dsoftmax.losses.trainer import HeadTrainer

if TYPE_CHECKING:
    from dsoftmax.losses.head import Head


class HalfShard(LocalShard):
    """A range of classes whose weights are 2-byte numbers in the host's memory.

    Parameters
    ----------
    start, stop : int
        The range.
    width : int
        D.
    device : mx.Context
        Where the products are computed.
    half : type of Half
        The format.
    """

    dtype = CARRIER

    def __init__(self, start: int, stop: int, width: int, device: mx.Context, half: type[Half]):
        super().__init__(start, stop, width, device, mx.cpu(0))
        self._half = half

    def take(self, class_rows: np.ndarray, out: nd.NDArray | None = None) -> nd.NDArray:
        """Return the weights of some classes as float32, (n, D) on the CPU."""
        return take_half_rows(self.weight, class_rows, self._half, out)

    def block(self, start: int, stop: int) -> nd.NDArray:
        """Return the weights of neighbouring classes as float32, (stop - start, D) on the CPU."""
        return self.take(np.arange(start, stop))


class HalfHostStore(HostStore):
    """Class weights in the host's memory in half the bytes, rounded at random by each update.

    Outside they are float32: `blocks` and `fill` exchange the exact numbers.
    """

    half: ClassVar[type[Half]]

    def _make_shard(self, start: int, stop: int, device: mx.Context) -> HalfShard:
        return HalfShard(start, stop, self.shape[1], device, self.half)

    @classmethod
    def memory(
        cls, num_classes: int, width: int, devices: int, processes: int, copies: int
    ) -> StoreMemory:
        """Estimate the memory of a store before it exists."""
        of_floats = super().memory(num_classes, width, devices, processes, copies)
        return of_floats._replace(host=of_floats.host // FLOAT_BYTES * HALF_BYTES)

    def _read_rows(self, part: nd.NDArray, start: int, stop: int) -> nd.NDArray:
        rows = self.half.decode(memory_of(part)[start:stop])
        return from_numpy(rows, mx.cpu(0), "float32")

    def _write_rows(self, part: nd.NDArray, start: int, rows: nd.NDArray | np.ndarray) -> None:
        """Set rows of an array from `start` on, rounded to the nearest 2-byte numbers."""
        halves = memory_of(part)
        for first in range(0, len(rows), CARRIED_AT_ONCE):
            block = rows[first : first + CARRIED_AT_ONCE]
            block = block.asnumpy() if isinstance(block, nd.NDArray) else block
            block = np.ascontiguousarray(block, np.float32)
            largest = np.abs(block).max()
            if largest > self.half.largest:
                raise ValueError(
                    f"{self.half.name} holds numbers up to {self.half.largest:g}, not {largest:g}: "
                    "keep the class weights as float32"
                )
            halves[start + first : start + first + len(block)] = self.half.encode(block)

    def make_trainer(self, head: Head, optimizer: Any, optimizer_params: dict) -> HeadTrainer:
        """Make the trainer that rounds the updated weights."""
        return HalfTrainer(head, optimizer, optimizer_params)

    def describe(self) -> str:
        """Say where the weights live, as what, and where they are computed with."""
        return f"{super().describe()}, as {self.half.name}"


class Float16HostStore(HalfHostStore):
    """Class weights in the host's memory as float16."""

    half = Float16


class BFloat16HostStore(HalfHostStore):
    """Class weights in the host's memory as bfloat16."""

    half = BFloat16


class HalfTrainer(HeadTrainer):
    """Updates 2-byte class weights and momenta by SGD in float32.

    Each result is rounded at random, as a function of (seed, update, class).

    Parameters
    ----------
    head : Head
        With a `HalfHostStore`.
    optimizer : str or mx.optimizer.SGD
    optimizer_params : dict
    """

    def __init__(self, head: Head, optimizer, optimizer_params: dict):
        super().__init__(head, optimizer, optimizer_params)
        if type(self._optimizer) is not mx.optimizer.SGD:
            raise ValueError(
                f"{head.store.half.name} class weights can only be updated by sgd, not "
                f"{type(self._optimizer).__name__.lower()}, whose states may not fit into 2 bytes: "
                "choose sgd, or keep the class weights as float32"
            )

    def _update(self, number: int, class_rows: np.ndarray, gradient: RowGradient) -> None:
        """Update class rows of a shard."""
        store = self._head.store
        shard = store.shards[number]
        if shard.home != shard.device:
            gradient = RowGradient(gradient.whole().as_in_context(shard.home))
        self._count_update(number)
        self._optimizer._update_count(number)
        keys = row_keys(self._head.seed, self._updates, class_rows + shard.start)
        update_half_rows(
            self._sgd(number),
            store.half,
            shard.weight,
            self._states[number],
            class_rows,
            keys,
            gradient,
        )
