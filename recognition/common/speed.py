"""Measure how fast a device multiplies matrices and copies memory."""

from __future__ import annotations

import time
from typing import Callable, NamedTuple

import mxnet as mx
from mxnet import nd

from dsoftmax.recognition.common.products import Product, transposed_times

COPIED_FLOATS = 1 << 26  # far more than any cache holds
MULTIPLIED_CLASSES = 8192  # enough for the products to be as fast as they get
REPETITIONS = 5


class Speed(NamedTuple):
    """What a device can do."""

    products: float  # floating-point operations per second
    copies: float  # bytes per second, read and written


def measure_speed(device: mx.Context, batch_size: int, width: int) -> Speed:
    """Measure a device, in a few seconds.

    Parameters
    ----------
    device : mx.Context
    batch_size, width : int
        B and D of the products that count.
    """
    return Speed(product_rate(device, batch_size, width), copy_bandwidth(device))


def product_rate(device: mx.Context, batch_size: int, width: int) -> float:
    """Return the operations per second of a head's three products: logits and both gradients."""
    embeddings = nd.random.normal(shape=(batch_size, width), ctx=device)
    weights = nd.random.normal(shape=(MULTIPLIED_CLASSES, width), ctx=device)
    logits = nd.empty((batch_size, MULTIPLIED_CLASSES), ctx=device)
    gradient = nd.empty((MULTIPLIED_CLASSES, width), ctx=device)

    def multiply() -> None:
        Product(embeddings, weights, logits).times(logits).wait_to_read()
        transposed_times(logits, None, embeddings, gradient)

    return 6 * batch_size * width * MULTIPLIED_CLASSES / _seconds(multiply)


def copy_bandwidth(device: mx.Context) -> float:
    """Return the bytes per second that a plain copy of a large array reads and writes."""
    source, target = (nd.zeros((COPIED_FLOATS,), ctx=device) for _ in range(2))
    return 2 * 4 * COPIED_FLOATS / _seconds(lambda: source.copyto(target))


def _seconds(do: Callable[[], object]) -> float:
    """Return the shortest of a few times that something takes."""
    taken = []
    for _ in range(REPETITIONS):
        nd.waitall()
        started = time.perf_counter()
        do()
        nd.waitall()
        taken.append(time.perf_counter() - started)
    return min(taken)
