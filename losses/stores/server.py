"""Class weights on MXNet's parameter servers.

The servers hold weights and momenta in their memory and update them. A worker pulls the class rows
that a step uses of its share of the classes, and pushes their gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator

import mxnet as mx
import numpy as np
from mxnet import nd

from dsoftmax.losses.kernels import take_rows
from dsoftmax.losses.stores.base import (
    CARRIED_AT_ONCE,
    FLOAT_BYTES,
    INITIALIZED_AT_ONCE,
    WEIGHT,
    ClassStore,
    Shard,
    StoreMemory,
    state_name,
)
from dsoftmax.losses.trainer import HeadTrainer
from dsoftmax.recognition.common.distributed.group import Group
from dsoftmax.recognition.common.distributed.heartbeat import beat
from dsoftmax.recognition.common.distributed.parameter_server.keys import momenta_key, weights_key
from dsoftmax.recognition.common.distributed.parameter_server.rows import ServerRows
from dsoftmax.recognition.common.distributed.parameter_server.worker import ServerGroup

if TYPE_CHECKING:
    from dsoftmax.losses.head import Head

KEYS = {WEIGHT: weights_key, state_name(0): momenta_key}


class ServerShard(Shard):
    """A range of classes that one device computes with, stored on the servers.

    Parameters
    ----------
    start, stop : int
        The range.
    device : mx.Context
    rows : ServerRows
        Of all classes.
    """

    def __init__(self, start: int, stop: int, device: mx.Context, rows: ServerRows):
        super().__init__(start, stop, device, mx.cpu(0))
        self._rows = rows

    def take(self, class_rows: np.ndarray, out: nd.NDArray | None = None) -> nd.NDArray:
        """Return the weights of some classes, (n, D) on the CPU."""
        classes, places = np.unique(class_rows, return_inverse=True)
        return take_rows(self._rows.pull(classes + self.start), places, out)

    def block(self, start: int, stop: int) -> nd.NDArray:
        """Return the weights of neighbouring classes, (stop - start, D) on the CPU."""
        return self._rows.pull(np.arange(self.start + start, self.start + stop))


class ServerStore(ClassStore):
    """Class weights and their momenta in the memory of the parameter servers.

    Parameters
    ----------
    num_classes, width : int
        K and D.
    contexts : list of mx.Context
        The devices of this worker.
    group : ServerGroup
    """

    needs_sampled_classes = True

    def __init__(
        self,
        num_classes: int,
        width: int,
        contexts: list[mx.Context],
        group: Group,
        subcentres: int = 1,
    ):
        if not isinstance(group, ServerGroup):
            raise ValueError("store='server' needs a group of MXNet's parameter server (dist_sync)")
        self.rows = ServerRows(num_classes * subcentres, width, group)
        super().__init__(num_classes, width, contexts, group, subcentres)

    def _make_shard(self, start: int, stop: int, device: mx.Context) -> ServerShard:
        return ServerShard(start, stop, device, self.rows)

    @classmethod
    def memory(
        cls, num_classes: int, width: int, devices: int, processes: int, copies: int
    ) -> StoreMemory:
        """Estimate the memory of a store before it exists; servers always hold momenta."""
        return StoreMemory(servers=FLOAT_BYTES * 2 * num_classes * width)

    def initialize(self, initializer: mx.init.Initializer, seed: int) -> None:
        """Draw all weights anew; the result depends on the seed alone, not on the split."""
        with self.rows.assigning():
            if self.group.is_first:
                for start, block in self._draw_weights(initializer, seed):
                    self.rows.assign(start, start + len(block), block)
                return
            for start, stop in self._ranges(INITIALIZED_AT_ONCE):
                self.rows.assign(start, stop, None)

    def blocks(self, name: str = WEIGHT) -> Iterator[np.ndarray]:
        """Yield an array, numpy (some, D) per block, from class 0 on, in every process."""
        for start, stop in self._ranges(CARRIED_AT_ONCE):
            yield self.rows.pull(np.arange(start, stop), KEYS[name]).asnumpy()
            beat()

    def assist_reading(self, name: str = WEIGHT) -> None:
        """Do nothing: the reader asks the servers alone."""

    def fill(self, rows: np.ndarray | None, name: str = WEIGHT) -> None:
        """Set an array from the first process's rows, (K, D); all processes must call it."""
        with self.rows.assigning():
            for start, stop in self._ranges(CARRIED_AT_ONCE):
                block = rows[start:stop] if self.group.is_first else None
                self.rows.assign(start, stop, block, KEYS[name])

    def _ranges(self, size: int) -> Iterator[tuple[int, int]]:
        for start in range(0, self.shape[0], size):
            yield start, min(start + size, self.shape[0])

    def make_trainer(self, head: Head, optimizer: Any, optimizer_params: dict) -> HeadTrainer:
        """Make the trainer that has the servers update the weights."""
        return ServerTrainer(head, optimizer, optimizer_params)

    def all_finite(self) -> bool:
        """Return True: the weights are checked when they are read to be saved."""
        return True

    def describe(self) -> str:
        """Say where the weights live, and where they are computed with."""
        return f"{super().describe()}, from parameter servers"


class ServerTrainer(HeadTrainer):
    """Sends the gradients of the class weights to the servers, which update them.

    Parameters
    ----------
    head : Head
        With a `ServerStore`.
    optimizer : str or mx.optimizer.SGD
    optimizer_params : dict
    """

    def __init__(self, head: Head, optimizer, optimizer_params: dict):
        super().__init__(head, optimizer, optimizer_params)
        if type(self._optimizer) is not mx.optimizer.SGD:
            raise ValueError(
                f"parameter servers only know sgd, not {type(self._optimizer).__name__.lower()}"
            )
        self._orders: dict[str, Any] = {}  # what the servers were told last

    def _update_all(self, gradients) -> None:
        """Send the gradients of a step to the servers."""
        store = self._head.store
        self._optimizer._index_update_count[0] = self._updates
        self._optimizer._update_count(0)
        orders = self._sgd(0)._asdict()
        orders["clip_gradient"] = orders["clip_gradient"] or -1.0
        if orders != self._orders and store.group.is_first:
            store.group.tell_servers({"sgd": orders})
        self._orders = orders
        classes, copies = [], []
        for number, class_rows, gradient in gradients:
            classes.append(class_rows + store.shards[number].start)
            copies.append(gradient.whole().copyto(mx.cpu(0)))  # the next block reuses its memory
        if not classes:
            store.rows.push(np.empty(0, np.int64), None)
            return
        classes = np.concatenate(classes)
        order = np.argsort(classes)
        store.rows.push(classes[order], take_rows(nd.concat(*copies, dim=0), order))

    def _keep_states(self) -> None:
        """Do nothing: the servers hold the momenta."""
