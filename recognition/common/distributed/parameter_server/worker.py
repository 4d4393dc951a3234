"""The workers of a job on MXNet's parameter server."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.base import _LIB, check_call

from dsoftmax.recognition.common.distributed.group import Group
from dsoftmax.recognition.common.distributed.parameter_server.keys import (
    LARGEST_KEY,
    choose_address,
)

COMMAND = 0


class ServerGroup(Group):
    """The workers of a job on MXNet's parameter server.

    The environment says how to meet, as `tools/launch.py` sets it. The rank is ``DSOFTMAX_RANK``,
    so that the first process of a restarted job is where it was before, or else the scheduler's.
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
            self.tell_servers({})  # they begin to work when the first order arrives
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

    def tell_servers(self, orders: dict[str, Any]) -> None:
        """Change how servers treat all later pushes; only the first worker calls it."""
        nd.waitall()  # pending pushes still follow the old orders
        self.kv._send_command_to_servers(COMMAND, json.dumps(orders))

    def close(self) -> None:
        """Release the servers together with all workers: an open store keeps them waiting."""
        self.barrier()
        check_call(_LIB.MXKVStoreFree(self.kv.handle))
        self.kv.handle = ctypes.c_void_p()
        self.is_open = False
        atexit.unregister(self._fail)

    def _fail(self) -> None:
        """End a process that did not `close` with an exit code that stops the others."""
        print("this worker ends without close(), while others depend on it", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
