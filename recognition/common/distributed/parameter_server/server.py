"""The servers and the scheduler of a job: `train.py` becomes one if DMLC_ROLE says so.

Servers add up what the workers push. A sum replaces the array of its key; a gradient of class
weights updates the rows that were pushed, by stochastic gradient descent. Workers send orders as
JSON; nothing that arrives is unpickled.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, Callable

import mxnet as mx
from mxnet import nd
from mxnet.kvstore.kvstore_server import KVStoreServer

from dsoftmax.recognition.common.distributed.parameter_server.keys import (
    FIRST_CLASS_KEY,
    choose_address,
    weights_of_momenta,
)


def serve() -> None:
    """Run as the server or the scheduler of a job until its workers are done."""
    choose_address()
    _Server(mx.kv.create("dist_sync")).run()


def _leave_on_error(function: Callable) -> Callable:
    """Wrap what MXNet calls: it would print an exception and go on without the update."""

    def call(*arguments) -> None:
        try:
            function(*arguments)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    return call


class _Server(KVStoreServer):
    def _controller(self) -> Callable[..., None]:
        updates = Updates()

        @_leave_on_error
        def control(_, body: bytes, __) -> None:
            updates.obey(json.loads(body))
            # MXNet takes it only once the server runs.
            self.kvstore._set_updater(_leave_on_error(updates))

        return control


class Updates:
    """Updates a server's arrays by the workers' pushes."""

    def __init__(self):
        self._is_assigning = False
        self._sgd: dict[str, Any] = {}
        self._momenta: dict[int, Any] = {}  # by the key of their weights

    def obey(self, orders: dict[str, Any]) -> None:
        """Take new orders: ``assigning``, or the options of ``sgd``."""
        self._is_assigning = orders.get("assigning", self._is_assigning)
        self._sgd = orders.get("sgd", self._sgd)

    def __call__(self, key: int, pushed, array) -> None:
        """Change the array of a key by the sum of what all workers pushed."""
        if key < FIRST_CLASS_KEY:
            array[:] = pushed
            return
        weights = weights_of_momenta(key)
        if self._is_assigning:
            # w - lr (g + wd w) is g: the only exact way to set rows of a row-sparse array in place.
            nd.sgd_update(array, pushed, out=array, lr=-1.0, wd=-1.0, lazy_update=True)
        elif weights is not None:
            self._momenta[weights] = array
        elif self._sgd["momentum"]:
            nd.sgd_mom_update(
                array, pushed, self._momenta[key], out=array, lazy_update=True, **self._sgd
            )
        else:
            options = {name: value for name, value in self._sgd.items() if name != "momentum"}
            nd.sgd_update(array, pushed, out=array, lazy_update=True, **options)
