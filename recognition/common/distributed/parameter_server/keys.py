"""The keys under which MXNet's servers hold arrays, and the address where processes listen."""

from __future__ import annotations

import os
import socket

FIRST_CLASS_KEY = 1 << 20  # keys below it are sums over workers
LARGEST_KEY = (1 << 31) - 1  # bytes of an array that MXNet's servers take


def weights_key(number: int) -> int:
    """Return the key of the weights of a range of classes."""
    return FIRST_CLASS_KEY + 2 * _servers() * number


def momenta_key(number: int) -> int:
    """Return the key of their momenta.

    MXNet puts a small array on the server that its key modulo the number of servers names: weights
    and momenta must lie on the same one.
    """
    return weights_key(number) + _servers()


def weights_of_momenta(key: int) -> int | None:
    """Return the key of the weights whose momenta have this key; None for other keys."""
    pair, is_momenta = divmod((key - FIRST_CLASS_KEY) // _servers(), 2)
    return weights_key(pair) if is_momenta else None


def _servers() -> int:
    return int(os.environ["DMLC_NUM_SERVER"])


def choose_address() -> None:
    """Have MXNet listen on the network that leads to the scheduler, unless a variable names one.

    By default MXNet takes the first network of a host, which may be Docker's, and waits for ever.
    """
    if not {"DMLC_NODE_HOST", "DMLC_INTERFACE"} & set(os.environ):
        scheduler = os.environ["DMLC_PS_ROOT_URI"], int(os.environ["DMLC_PS_ROOT_PORT"])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect(scheduler)
            os.environ["DMLC_NODE_HOST"] = probe.getsockname()[0]
