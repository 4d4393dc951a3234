"""Class weights on MXNet's parameter servers, and the group of its workers.

The servers hold weights and momenta in their memory and update them themselves. A worker pulls the
rows that a step uses of its share of the classes, and pushes their gradients. Rows are split over
keys of less than 2^31 bytes, and by MXNet over the servers.

What MXNet does not forgive is kept here: rows are pushed sorted, distinct and within the key; all
workers push each key once a step; a key is used again only when what was sent and asked for before
has arrived, as MXNet keeps no order between the two; nothing is pending when the servers are told
something new.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Iterator

import mxnet as mx
import numpy as np
from mxnet import nd

from dsoftmax.losses.kernels import take_rows
from dsoftmax.losses.stores import CARRIED_AT_ONCE, INITIALIZED_AT_ONCE, ClassStore, Shard
from dsoftmax.losses.trainer import HeadTrainer
from dsoftmax.recognition.common.distributed.parameter_server.keys import (
    LARGEST_KEY,
    momenta_key,
    weights_key,
)
from dsoftmax.recognition.common.distributed.parameter_server.worker import ServerGroup

if TYPE_CHECKING:
    from dsoftmax.losses.head import Head


class ServerShard(Shard):
    """A range of classes that one device computes with, stored on the servers.

    Parameters
    ----------
    start, stop : int
        The range.
    device : mx.Context
    store : ServerStore
    """

    def __init__(self, start: int, stop: int, device: mx.Context, store: ServerStore):
        self.start, self.stop = start, stop
        self.device, self.home = device, mx.cpu(0)
        self._store = store

    def is_finite(self) -> bool:
        """Say nothing against them: they are looked at when they are read to be saved."""
        return True

    def take(self, rows: np.ndarray, out: nd.NDArray | None = None) -> nd.NDArray:
        """Return rows of the range, (n, D) on the CPU."""
        classes, places = np.unique(rows, return_inverse=True)
        return take_rows(self._store.pull(classes + self.start), places, out)

    def block(self, start: int, stop: int) -> nd.NDArray:
        """Return neighbouring rows of the range, (stop - start, D) on the CPU."""
        return self._store.pull(np.arange(self.start + start, self.start + stop))


class ServerStore(ClassStore):
    """All class weights and their momenta, on the servers.

    Parameters
    ----------
    num_classes, width : int
        K and D.
    contexts : list of mx.Context
        The devices of this worker that share the classes.
    group : ServerGroup
    """

    reads_together = False

    def __init__(
        self, num_classes: int, width: int, contexts: list[mx.Context], group: ServerGroup
    ):
        super().__init__(num_classes, width, contexts, True, group)
        self._has_pushed = False
        rows = LARGEST_KEY // (4 * width)
        self._key_borders = [*range(0, num_classes, rows), num_classes]
        self._first_range = group.ranges_of_classes
        group.ranges_of_classes += len(self._key_borders) - 1
        for number, start, stop in self._key_ranges():
            for key in (weights_key(number), momenta_key(number)):
                self._create(key, stop - start)
            # The servers get to know the array of momenta when they are sent nothing for it.
            self._push_rows(momenta_key(number), stop - start, np.empty(0, np.int64), None)
        group.barrier()

    def _make_shard(self, start: int, stop: int, device: mx.Context, on_host: bool) -> Shard:
        return ServerShard(start, stop, device, self)

    def _create(self, key: int, count: int) -> None:
        shape = (count, self.shape[1])
        if self.group.kv.rank:  # only the array of MXNet's first worker is looked at
            array = nd.sparse.zeros("row_sparse", shape)
        else:
            rows = nd.arange(count, dtype="int64")
            array = nd.sparse.row_sparse_array((nd.zeros(shape), rows), shape=shape)
        self.group.kv.init(key, array)

    def _key_ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield the number of each range of classes that has keys, its first class and its end."""
        for place, (start, stop) in enumerate(zip(self._key_borders, self._key_borders[1:])):
            yield self._first_range + place, start, stop

    def initialize(self, initializer: mx.init.Initializer, seed: int) -> None:
        """Draw all weights anew: the same ones for a seed, however they are split."""
        with self._assigning():
            if self.group.is_first:
                super().initialize(initializer, seed)
                return
            for start in range(0, self.shape[0], INITIALIZED_AT_ONCE):
                self.write(start, range(start, min(start + INITIALIZED_AT_ONCE, self.shape[0])))

    def write(self, start: int, rows: nd.NDArray | np.ndarray | range) -> None:
        """Set the weights of the classes from `start` on to the first worker's, while `_assigning`.

        Of what the others give only the length counts.
        """
        self._write_rows(weights_key, start, rows)

    def fill(self, rows: np.ndarray | None, kind=None) -> None:
        """Set the weights of all classes, or the momenta, from the first worker's rows, (K, D)."""
        with self._assigning():
            for start in range(0, self.shape[0], CARRIED_AT_ONCE):
                stop = min(start + CARRIED_AT_ONCE, self.shape[0])
                block = rows[start:stop] if self.group.is_first else range(start, stop)
                self._write_rows(kind or weights_key, start, block)

    def blocks(self, kind=None) -> Iterator[np.ndarray]:
        """Yield the weights of all classes, or `momenta_key`, numpy (some, D), from class 0 on."""
        for start in range(0, self.shape[0], CARRIED_AT_ONCE):
            stop = min(start + CARRIED_AT_ONCE, self.shape[0])
            yield self.pull(np.arange(start, stop), kind or weights_key).asnumpy()

    @contextlib.contextmanager
    def _assigning(self) -> Iterator[None]:
        """Have the servers take what is pushed for the new value instead of a gradient."""
        for is_assigning in (True, False):
            self.group.barrier()
            if self.group.is_first:
                self.group.tell_servers({"assigning": is_assigning})
            self.group.barrier()
            if is_assigning:
                yield

    def _write_rows(self, kind, start: int, rows) -> None:
        self._settle()
        stop = start + len(rows)
        for number, first, last in self._key_ranges():
            low, high = max(start, first), min(stop, last)
            if low >= high:
                continue
            values, places = None, np.empty(0, np.int64)
            if self.group.is_first:
                part = rows[low - start : high - start]
                values = part if isinstance(part, nd.NDArray) else nd.array(part)
                places = np.arange(low - first, high - first)
            self._push_rows(kind(number), last - first, places, values)

    def pull(self, classes: np.ndarray, kind=None) -> nd.NDArray:
        """Return the weights of some classes, sorted and distinct: (n, D) on the CPU."""
        self._check(classes)
        self._settle()
        parts = []
        for number, first, last in self._key_ranges():
            low, high = np.searchsorted(classes, (first, last))
            if low == high:
                continue
            found = nd.sparse.zeros("row_sparse", (last - first, self.shape[1]))
            rows = nd.from_numpy(classes[low:high] - first, zero_copy=False)
            self.group.kv.row_sparse_pull((kind or weights_key)(number), out=found, row_ids=rows)
            parts.append(found.data)
        if not parts:
            return nd.zeros((0, self.shape[1]))
        return parts[0] if len(parts) == 1 else nd.concat(*parts, dim=0)

    def push(self, classes: np.ndarray, gradients: nd.NDArray | None) -> None:
        """Send the gradients (n, D) of some classes, sorted and distinct.

        All workers must call it for each update, with nothing where they have nothing.
        """
        self._check(classes)
        self._settle()
        for number, first, last in self._key_ranges():
            low, high = np.searchsorted(classes, (first, last))
            values = None if low == high else gradients[low:high]
            self._push_rows(weights_key(number), last - first, classes[low:high] - first, values)

    def _settle(self) -> None:
        """Wait until the servers have all that was pushed."""
        if self._has_pushed:
            nd.waitall()
            self._has_pushed = False

    def _check(self, classes: np.ndarray) -> None:
        """Refuse what would crash the servers, or what they would drop without a word."""
        if (np.diff(classes) <= 0).any():
            raise ValueError("classes must be sorted and distinct")
        if len(classes) and not 0 <= classes[0] <= classes[-1] < self.shape[0]:
            raise ValueError(
                f"classes {classes[0]} to {classes[-1]} are not within 0 to {self.shape[0] - 1}"
            )

    def _push_rows(self, key: int, count: int, rows: np.ndarray, values) -> None:
        shape = (count, self.shape[1])
        if len(rows):
            index = nd.from_numpy(rows, zero_copy=False)
            array = nd.sparse.row_sparse_array((values, index), shape=shape)
        else:
            array = nd.sparse.zeros("row_sparse", shape)
        self.group.kv.push(key, array)
        self._has_pushed = True


class ServerTrainer(HeadTrainer):
    """Sends the gradients of a head's class weights to the servers, which update them.

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
                f"the servers know sgd alone, not {type(self._optimizer).__name__.lower()}"
            )
        self._told: dict[str, Any] = {}

    def _update_all(self, gradients) -> None:
        """Update the weights by the gradients of a batch."""
        store = self._head.store
        self._optimizer._index_update_count[0] = self._updates
        self._optimizer._update_count(0)
        options = self._sgd(0)._asdict()
        options["clip_gradient"] = options["clip_gradient"] or -1.0
        if options != self._told and store.group.is_first:
            store.group.tell_servers({"sgd": options})
        self._told = options
        classes, copies = [], []
        for number, rows, gradient in gradients:
            classes.append(rows + store.shards[number].start)
            copies.append(gradient.whole().copyto(mx.cpu(0)))  # its memory is used again
        if not classes:
            store.push(np.empty(0, np.int64), None)
            return
        classes = np.concatenate(classes)
        order = np.argsort(classes)
        store.push(classes[order], take_rows(nd.concat(*copies, dim=0), order))

    def _read_states(self) -> list[Iterator[np.ndarray]]:
        return [self._head.store.blocks(momenta_key)] if self._number_of_states() else []

    def _write_states(self, arrays: list[np.ndarray]) -> None:
        if self._number_of_states():
            self._head.store.fill(arrays[0] if arrays else None, momenta_key)
