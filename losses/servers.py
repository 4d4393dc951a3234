"""Class weights on MXNet's parameter servers, and the group of its workers.

The servers (`dsoftmax.recognition.server`) hold weights and momenta in their memory and update them
themselves. A worker pulls the rows that a step uses of its share of the classes, and pushes their
gradients. Rows are split over keys of less than 2^31 bytes, and by MXNet over the servers.

What MXNet does not forgive is kept here: rows are pushed sorted, distinct and within the key; all
workers push each key once a step; a key is used again only when what was sent and asked for before
has arrived, as MXNet keeps no order between the two; nothing is pending when the servers are told
something new.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import socket
import sys
from typing import TYPE_CHECKING, Any, Iterator

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.base import _LIB, check_call

from dsoftmax.losses.groups import Group
from dsoftmax.losses.kernels import take_rows
from dsoftmax.losses.stores import CARRIED_AT_ONCE, INITIALIZED_AT_ONCE, ClassStore, Shard
from dsoftmax.losses.trainer import HeadTrainer

if TYPE_CHECKING:
    from dsoftmax.losses.head import Head

FIRST_CLASS_KEY = 1 << 20  # those below are sums over workers
LARGEST_KEY = (1 << 31) - 1  # bytes of an array that MXNet's servers take
COMMAND = 0


def _weights(number: int) -> int:
    """Return the key of the weights of a range of classes."""
    return FIRST_CLASS_KEY + 2 * _servers() * number


def _momenta(number: int) -> int:
    """Return the key of their momenta.

    A small array is on one server, by its key modulo the number of servers: the same one's.
    """
    return _weights(number) + _servers()


def weights_of_momenta(key: int) -> int | None:
    """Return the key of the weights whose momenta have this key; None if it is not one of those."""
    pair, is_momenta = divmod((key - FIRST_CLASS_KEY) // _servers(), 2)
    return _weights(pair) if is_momenta else None


def _servers() -> int:
    return int(os.environ["DMLC_NUM_SERVER"])


def choose_address() -> None:
    """Have MXNet listen where the scheduler is reached from, unless it was told where.

    By itself it takes the first network of a host, which may be Docker's, and waits for ever.
    """
    if not {"DMLC_NODE_HOST", "DMLC_INTERFACE"} & set(os.environ):
        scheduler = os.environ["DMLC_PS_ROOT_URI"], int(os.environ["DMLC_PS_ROOT_PORT"])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect(scheduler)
            os.environ["DMLC_NODE_HOST"] = probe.getsockname()[0]


class ServerGroup(Group):
    """The workers of a job on MXNet's parameter server.

    The environment tells how to meet, as `tools/launch.py` sets it. The rank is that of
    ``DSOFTMAX_RANK``, so that a restarted job has its first process where it was before, or else
    the one the scheduler deals out.
    """

    def __init__(self):
        choose_address()
        self.kv = mx.kv.create("dist_sync")
        self.is_open = True
        # This also keeps the store alive: its destructor waits for all other workers to leave.
        atexit.register(self._fail)
        self.size = self.kv.num_workers
        self.rank = int(os.environ.get("DSOFTMAX_RANK", self.kv.rank))
        self._keys: dict[tuple, int] = {}
        self.ranges_of_classes = 0  # that have keys
        if self.is_first:
            self.tell_servers({})  # they begin to work when they are told something
        self.barrier()
        self._check_ranks()

    def _check_ranks(self) -> None:
        known = np.zeros(self.size, np.float32)
        if 0 <= self.rank < self.size:
            known[self.rank] = 1
        if (self.sum("ranks", nd.array(known)).asnumpy() != 1).any():
            raise ValueError(
                f"DSOFTMAX_RANK must be another number from 0 to {self.size - 1} for each worker"
            )

    def sum_arrays(self, name: str, arrays: list[nd.NDArray]) -> list[nd.NDArray]:
        """Return the sums over all workers of some arrays, each on its array's context."""
        if self.size == 1:
            return arrays
        keys = [self._key(name, place, array) for place, array in enumerate(arrays)]
        for key, array in zip(keys, arrays):
            self.kv.push(key, array)
        sums = [nd.empty(array.shape, array.context, array.dtype) for array in arrays]
        for key, total in zip(keys, sums):
            self.kv.pull(key, out=total)
        for total in sums:
            total.wait_to_read()
        return sums

    def _key(self, name: str, place: int, array: nd.NDArray) -> int:
        """Return the key of an array of this name and shape; all workers count alike."""
        described = (name, place, array.shape, np.dtype(array.dtype).name)
        if described not in self._keys:
            if array.size * 4 > LARGEST_KEY:
                raise ValueError(f"{name}: an array of shape {array.shape} is too large to be sent")
            self._keys[described] = len(self._keys)
            self.kv.init(self._keys[described], nd.zeros(array.shape, dtype=array.dtype))
        return self._keys[described]

    def barrier(self) -> None:
        """Wait until all workers are here and nothing they sent is on its way."""
        nd.waitall()
        self.kv._barrier()

    def tell_servers(self, told: dict[str, Any]) -> None:
        """Change how servers treat what is pushed from now on; for the first worker to call."""
        nd.waitall()  # what is on its way was meant as before
        self.kv._send_command_to_servers(COMMAND, json.dumps(told))

    def close(self) -> None:
        """Let the servers go, when all workers do: a store that is left open keeps them waiting."""
        self.barrier()
        check_call(_LIB.MXKVStoreFree(self.kv.handle))
        self.kv.handle = ctypes.c_void_p()
        self.is_open = False
        atexit.unregister(self._fail)

    def _fail(self) -> None:
        """End a process that did not `close`, with an exit code that has the others stopped."""
        print("this worker ends without close(), while others count on it", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


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
            for key in (_weights(number), _momenta(number)):
                self._create(key, stop - start)
            # The servers get to know the array of momenta when they are sent nothing for it.
            self._push_rows(_momenta(number), stop - start, np.empty(0, np.int64), None)
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
        self._write_rows(_weights, start, rows)

    def fill(self, rows: np.ndarray | None, kind=None) -> None:
        """Set the weights of all classes, or `_momenta`, from the first worker's rows, (K, D)."""
        with self._assigning():
            for start in range(0, self.shape[0], CARRIED_AT_ONCE):
                stop = min(start + CARRIED_AT_ONCE, self.shape[0])
                block = rows[start:stop] if self.group.is_first else range(start, stop)
                self._write_rows(kind or _weights, start, block)

    def blocks(self, kind=None) -> Iterator[np.ndarray]:
        """Yield the weights of all classes, or `_momenta`, numpy (some, D), from class 0 on."""
        for start in range(0, self.shape[0], CARRIED_AT_ONCE):
            stop = min(start + CARRIED_AT_ONCE, self.shape[0])
            yield self.pull(np.arange(start, stop), kind or _weights).asnumpy()

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
            self.group.kv.row_sparse_pull((kind or _weights)(number), out=found, row_ids=rows)
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
            self._push_rows(_weights(number), last - first, classes[low:high] - first, values)

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
        return [self._head.store.blocks(_momenta)] if self._number_of_states() else []

    def _write_states(self, arrays: list[np.ndarray]) -> None:
        if self._number_of_states():
            self._head.store.fill(arrays[0] if arrays else None, _momenta)
