"""Where class weights live, by name.

A store is one module with a `ClassStore`, and one line in `STORES`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dsoftmax.recognition.common.checks import did_you_mean

if TYPE_CHECKING:
    from dsoftmax.losses.stores.base import ClassStore

# Each class with its module, which is imported when it is needed: names alone need no MXNet.
STORES = {
    "device": "dsoftmax.losses.stores.local.DeviceStore",
    "host": "dsoftmax.losses.stores.local.HostStore",
    "server": "dsoftmax.losses.stores.server.ServerStore",
}


def find_store(name: str) -> type[ClassStore]:
    """Return the class of a store."""
    if name not in STORES:
        raise ValueError(f"there is no store {name!r}{did_you_mean(name, STORES)}")
    module, _, kind = STORES[name].rpartition(".")
    return getattr(importlib.import_module(module), kind)


def default_store(has_servers: bool, is_sampled: bool) -> str:
    """Return the name of the store to take where a user names none.

    Parameters
    ----------
    has_servers : bool
        Whether the job has parameter servers.
    is_sampled : bool
        Whether a step uses a sample of the classes alone.
    """
    return "server" if has_servers and is_sampled else "device"
