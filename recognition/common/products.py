"""Matrix products of MXNet's arrays, by the fastest way this machine has.

On CPUs MXNet's wheel has two ways: `dot` is OpenBLAS, which does not use AVX-512, and
`FullyConnected` is oneDNN. With AVX-512 oneDNN takes a half to a quarter of the time; without, both
are equal. The choice depends on the processor alone, never on a measurement: a resumed run must
multiply as the run before it did.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import mxnet as mx
from mxnet import autograd, nd

SWITCH = "DSOFTMAX_PRODUCTS"  # environment: "dot" or "onednn" instead of what fits the processor


@functools.lru_cache(maxsize=None)
def _cpu_way() -> str:
    chosen = os.environ.get(SWITCH)
    if chosen:
        if chosen not in ("dot", "onednn"):
            raise ValueError(f"{SWITCH} must be dot or onednn, not {chosen!r}")
        return chosen
    try:
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "dot"
    return "onednn" if re.search(r"\bavx512f\b", processor) else "dot"


def way(context: mx.Context) -> str:
    """Return how matrices on a context are multiplied: "dot" or "onednn"."""
    return _cpu_way() if context.device_type == "cpu" else "dot"


def times_transposed(a: nd.NDArray, b: nd.NDArray, out: nd.NDArray) -> None:
    """Compute a · bᵀ of (m, k) and (n, k) into `out`, (m, n)."""
    if way(a.context) == "dot":
        nd.dot(a, b, transpose_b=True, out=out)
    else:
        nd.FullyConnected(a, b, no_bias=True, num_hidden=len(b), out=out)


class Product:
    """a · bᵀ, into `out`, and then products with b.

    oneDNN's product with b is the backward pass of its a · bᵀ, which only autograd can call.

    Parameters
    ----------
    a : (m, k)
    b : (n, k)
    out : (m, n)
        May be overwritten as soon as the product is made.
    """

    def __init__(self, a: nd.NDArray, b: nd.NDArray, out: nd.NDArray):
        self._b = b
        if way(a.context) == "dot":
            nd.dot(a, b, transpose_b=True, out=out)
            return
        # Not `a` and `out` themselves: they may be a part of another graph.
        self._a, self._output = a[:], out[:]
        self._a.attach_grad()
        with autograd.record():
            nd.FullyConnected(self._a, b, no_bias=True, num_hidden=len(b), out=self._output)

    def times(self, g: nd.NDArray) -> nd.NDArray:
        """Return g · b, (m, k), of g (m, n); once."""
        if way(g.context) == "dot":
            return nd.dot(g, self._b)
        (product,) = autograd.grad([self._output], [self._a], head_grads=[g])
        del self._output  # and with it the graph
        return product


def times(a: nd.NDArray, b: nd.NDArray, out: nd.NDArray) -> None:
    """Compute a · b of (m, k) and (k, n) into `out`, (m, n), for a small b."""
    if way(a.context) == "dot":
        nd.dot(a, b, out=out)
    else:
        times_transposed(a, nd.transpose(b), out)


def transposed_times(
    a: nd.NDArray, a_transposed: nd.NDArray | None, b: nd.NDArray, out: nd.NDArray
) -> None:
    """Compute aᵀ · b of (k, m) and (k, n) into `out`, (m, n).

    Parameters
    ----------
    a : (k, m)
    a_transposed : (m, k), optional
        aᵀ, if it exists already.
    b : (k, n)
    out : (m, n)
    """
    if way(a.context) == "dot":
        nd.dot(a, b, transpose_a=True, out=out)
        return
    if a_transposed is None:
        a_transposed = nd.transpose(a)
    times(a_transposed, b, out)
