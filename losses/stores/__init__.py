"""Where class weights live, by name.

A store is one module with a `ClassStore`, and one line in `STORES`; if it keeps class weights as
another type than float32, one in `TYPED_STORES`.
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
# Those that keep class weights as another type than float32.
TYPED_STORES = {
    ("host", "float16"): "dsoftmax.losses.stores.half.Float16HostStore",
    ("host", "bfloat16"): "dsoftmax.losses.stores.half.BFloat16HostStore",
}
DTYPES = ("float32", *dict.fromkeys(dtype for _, dtype in TYPED_STORES))


def find_store(name: str, dtype: str = "float32") -> type[ClassStore]:
    """Return the class of a store that keeps class weights as a type."""
    if name not in STORES:
        raise ValueError(f"there is no store {name!r}{did_you_mean(name, STORES)}")
    if dtype not in DTYPES:
        raise ValueError(
            f"there is no dtype {dtype!r} of class weights{did_you_mean(dtype, DTYPES)}"
        )
    if dtype != "float32" and (name, dtype) not in TYPED_STORES:
        able = [store for store, other in TYPED_STORES if other == dtype]
        raise ValueError(
            f"store={name!r} keeps class weights as float32, not as {dtype}, which "
            f"{' and '.join(f'store={store!r}' for store in able)} can"
        )
    path = TYPED_STORES.get((name, dtype), STORES[name])
    module, _, kind = path.rpartition(".")
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
