"""Rewrite the graph of a trained network so that CPUs run it fast.

MXNet's PReLU is not among the operators that oneDNN computes, and it takes most of the time of a
network on CPUs. A graph is rewritten in two steps, each of which keeps its values up to rounding:

1. PReLU becomes a leaky rectifier and factors per channel.
2. A factor per channel, or a batch normalization, becomes a part of the convolution before it.
"""

from __future__ import annotations

import json
from typing import Any, Dict, Tuple

import mxnet as mx
import numpy as np

Parameters = Dict[str, mx.nd.NDArray]
Source = Tuple[int, int]  # the number of a node, and of its output


def for_cpus(symbol: mx.sym.Symbol, parameters: Parameters) -> tuple[mx.sym.Symbol, Parameters]:
    """Return a graph that computes the same embeddings faster on CPUs, and its parameters.

    What can't be rewritten, because its parameters are not float32 for example, stays as it is.

    Parameters
    ----------
    symbol : mx.sym.Symbol
        A network for inference.
    parameters : dict
        Arrays by name; neither they nor the symbol are changed.
    """
    graph = _Graph(symbol, parameters)
    for number in range(len(graph.nodes)):
        _compose_prelu(graph, number)
    is_changed = True
    while is_changed:  # a convolution takes up one normalization, then the one after that
        folded = [_fold_normalization(graph, number) for number in range(len(graph.nodes))]
        is_changed = any(folded)
    return graph.symbol(), graph.parameters


class _Graph:
    """The nodes of a symbol, as its JSON lists them, and the parameters."""

    def __init__(self, symbol: mx.sym.Symbol, parameters: Parameters):
        self._json = json.loads(symbol.tojson())
        self.nodes: list[dict[str, Any]] = self._json["nodes"]
        self.parameters = dict(parameters)

    def symbol(self) -> mx.sym.Symbol:
        """Return the graph; nodes that nothing uses any more disappear."""
        is_variable = [node["op"] == "null" for node in self.nodes]
        self._json["arg_nodes"] = np.flatnonzero(is_variable).tolist()
        self._json.pop("node_row_ptr", None)
        return mx.sym.load_json(json.dumps(self._json, ensure_ascii=False))  # MXNet knows no \u

    def add(self, op: str, name: str, inputs: list[Source], **attributes) -> Source:
        """Add a node; return its output."""
        attrs = {key: str(value) for key, value in attributes.items()}
        sources = [[number, output, 0] for number, output in inputs]
        self.nodes.append({"op": op, "name": name, "attrs": attrs, "inputs": sources})
        return len(self.nodes) - 1, 0

    def add_parameter(self, name: str, value: np.ndarray) -> Source:
        """Add a parameter; return it."""
        while name in self.parameters:
            name += "_"
        self.parameters[name] = mx.nd.array(value, dtype=np.float32)
        return self.add("null", name, [])

    def scale(self, name: str, data: Source, factors: np.ndarray) -> Source:
        """Multiply channels by factors; as batch normalization, which oneDNN computes."""
        zeros, ones = np.zeros_like(factors), np.ones_like(factors)
        values = {"gamma": factors, "beta": zeros, "moving_mean": zeros, "moving_var": ones}
        inputs = [self.add_parameter(f"{name}_{key}", value) for key, value in values.items()]
        return self.add("BatchNorm", name, [data, *inputs], eps=0.0, fix_gamma=False)

    def replace(self, number: int, source: Source) -> None:
        """Let what uses the first output of a node use another one, and remove the node."""
        for use in self._uses():
            if use[:2] == [number, 0]:
                use[:2] = source
        self.remove(number)

    def remove(self, number: int) -> None:
        """Remove a node that nothing uses any more; the others keep their numbers."""
        self.nodes[number] = {"op": "null", "name": f"removed{number}", "inputs": []}

    def outputs_used(self, number: int) -> list[int]:
        """Return the outputs of a node that are used, one entry per use."""
        return [output for user, output, *_ in self._uses() if user == number]

    def _uses(self) -> list[list[int]]:
        return [one for node in self.nodes for one in node["inputs"]] + self._json["heads"]

    def values(self, number: int) -> list[np.ndarray] | None:
        """Return the parameters of a node; None unless all are known, finite and float32."""
        names = [self.nodes[source]["name"] for source, *_ in self.nodes[number]["inputs"][1:]]
        arrays = [self.parameters.get(name) for name in names]
        if any(array is None or array.dtype != np.float32 for array in arrays):
            return None
        values = [array.asnumpy().astype(np.float64) for array in arrays]
        return values if all(np.isfinite(value).all() for value in values) else None


def _compose_prelu(graph: _Graph, number: int) -> None:
    """Make PReLU of operators that oneDNN has.

    With one slope γ it is a leaky rectifier. With a slope per channel it is v + b l(v), where
    v = s x and l is the leaky rectifier of a negative slope -a. Then s (1 + b) = 1 and
    s (1 - a b) = γ, hence b = (1 - γ) / (a + γ) and s = (a + γ) / (1 + a). Any a above all -γ
    serves. A convolution before it can take up s, and one factor per channel is left.
    """
    node = graph.nodes[number]
    if node["op"] != "LeakyReLU" or node.get("attrs", {}).get("act_type") != "prelu":
        return
    values = graph.values(number)
    if values is None or values[0].ndim != 1:
        return
    name, data, slopes = node["name"], tuple(node["inputs"][0][:2]), values[0]
    leaky = {"op": "LeakyReLU", "name": f"{name}_leaky", "act_type": "leaky"}
    if len(slopes) == 1:
        graph.replace(number, graph.add(**leaky, inputs=[data], slope=slopes[0]))
        return
    a = 1 + 2 * np.abs(slopes).max()
    scaled = graph.scale(f"{name}_scaled", data, (a + slopes) / (1 + a))
    bent = graph.add(**leaky, inputs=[scaled], slope=-a)
    rest = graph.scale(f"{name}_rest", bent, (1 - slopes) / (a + slopes))
    graph.replace(number, graph.add("elemwise_add", name, [scaled, rest]))


def _fold_normalization(graph: _Graph, number: int) -> bool:
    """Let a convolution do the work of the batch normalization after it; tell whether it does."""
    node = graph.nodes[number]
    if node["op"] != "BatchNorm" or set(graph.outputs_used(number)) != {0}:
        return False
    before = node["inputs"][0][0]
    convolution = graph.nodes[before]
    attrs, options = node.get("attrs", {}), convolution.get("attrs", {})
    if (
        convolution["op"] != "Convolution"
        or len(graph.outputs_used(before)) > 1
        or options.get("layout", "None") not in ("None", "NCHW")
        or int(attrs.get("axis", 1)) != 1
    ):
        return False
    values, weights = graph.values(number), graph.values(before)
    if values is None or weights is None:
        return False
    gamma, beta, mean, variance = values
    weight, bias = weights if len(weights) == 2 else (weights[0], 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = 1 / np.sqrt(variance + float(attrs.get("eps", 1e-3)))
    if not _is_true(attrs.get("fix_gamma", "True")):
        factors = factors * gamma
    if not np.isfinite(factors).all():
        return False
    name = f"{convolution['name']}_folded"
    scaled = weight * factors.reshape(-1, *[1] * (weight.ndim - 1))
    inputs = [
        tuple(convolution["inputs"][0][:2]),
        graph.add_parameter(f"{name}_weight", scaled),
        graph.add_parameter(f"{name}_bias", beta + (bias - mean) * factors),
    ]
    graph.replace(number, graph.add("Convolution", name, inputs, **{**options, "no_bias": False}))
    graph.remove(before)
    return True


def _is_true(text: str) -> bool:
    return text.lower() in ("true", "1")
