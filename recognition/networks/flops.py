"""Count the floating-point operations that a network takes per image."""

from __future__ import annotations

import json

import mxnet as mx
import numpy as np


def count_flops(symbol: mx.sym.Symbol, image_shape: tuple[int, int, int]) -> int:
    """Count the operations of convolutions and fully connected layers, as insightface does.

    Each number of a layer's output is a sum of n products: n multiplications and n - 1 additions,
    and one more addition for a bias. So the count is about twice the number of multiply-adds.
    Normalizations, activations and pooling are not counted. insightface counts too many additions
    in grouped convolutions: 439.8M for y1, which takes 438.7M.

    Parameters
    ----------
    symbol : mx.sym.Symbol
        The network, from ``data`` on.
    image_shape : (3, height, width)

    Returns
    -------
    int

    Examples
    --------
    >>> layer = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=10)
    >>> count_flops(layer, (3, 4, 4))
    960
    """
    internals = symbol.get_internals()
    _, shapes, _ = internals.infer_shape(data=(1, *image_shape))
    shape_of = dict(zip(internals.list_outputs(), shapes))
    nodes = json.loads(symbol.tojson())["nodes"]
    total = 0
    for node in nodes:
        if node["op"] in ("Convolution", "FullyConnected"):
            inputs = [nodes[number]["name"] for number, *_ in node["inputs"]]
            terms = np.prod(shape_of[inputs[1]][1:])  # (outputs, inputs of the group, …)
            has_bias = len(inputs) == 3
            outputs = np.prod(shape_of[f"{node['name']}_output"])
            total += int(outputs) * (2 * int(terms) - 1 + has_bias)
    return total


def format_flops(count: int) -> str:
    """Write a count as insightface does: 24.2G, 438.7M."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return f"{count:.1f}"
