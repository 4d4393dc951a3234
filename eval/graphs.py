"""Rewrite the graph of a trained network so that CPUs run it fast.

MXNet's PReLU is not among the operators that oneDNN computes, and it takes most of the time of a
network on CPUs. A graph is rewritten in two steps, each of which keeps its values up to rounding:

1. PReLU becomes a rectifier, a sum and signs per channel.
2. A batch normalization, or signs, become a part of the convolution before them; signs that no
   convolution precedes, a part of those that follow.
"""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Tuple

import mxnet as mx
import numpy as np

Parameters = Dict[str, mx.nd.NDArray]
Source = Tuple[int, int]  # the number of a node, and of its output


def for_cpus(symbol: mx.sym.Symbol, parameters: Parameters) -> tuple[mx.sym.Symbol, Parameters]:
    """Return a graph that computes the same embeddings faster on CPUs, and its parameters.

    What can't be rewritten, because its parameters are not float32 for example, stays as it is, and
    so does everything where MXNet runs without oneDNN.

    Parameters
    ----------
    symbol : mx.sym.Symbol
        A network for inference.
    parameters : dict
        Arrays by name; neither they nor the symbol are changed.
    """
    if not _has_onednn():
        return symbol, parameters
    graph = _Graph(symbol, parameters)
    for number in range(len(graph.nodes)):
        _compose_prelu(graph, number)
    is_changed = True
    while is_changed:  # a convolution takes up one normalization, then the one after that
        folded = [_fold_normalization(graph, number) for number in range(len(graph.nodes))]
        is_changed = any(folded)
    for number in range(len(graph.nodes)):
        _fold_into_next(graph, number)
        _rectify_at_once(graph, number)
    return graph.symbol(), graph.parameters


def _has_onednn() -> bool:
    """Tell whether MXNet uses oneDNN: its build may lack it, the environment switch it off."""
    is_switched_off = os.environ.get("MXNET_MKLDNN_ENABLED", "1") == "0"
    return mx.runtime.Features().is_enabled("MKLDNN") and not is_switched_off


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
        uses = [one for node in self.nodes for one in node["inputs"]] + self._json["heads"]
        for use in uses:
            if use[:2] == [number, 0]:
                use[:2] = source
        self.remove(number)

    def remove(self, number: int) -> None:
        """Remove a node that nothing uses any more; the others keep their numbers."""
        self.nodes[number] = {"op": "null", "name": f"removed{number}", "inputs": []}

    def uses(self, number: int) -> list[tuple[int | None, int]]:
        """Return who uses a node: (number, output of the node), number None for the graph's own."""
        of_nodes = [
            (user, output)
            for user, node in enumerate(self.nodes)
            for source, output, *_ in node["inputs"]
            if source == number
        ]
        of_graph = [
            (None, output) for source, output, *_ in self._json["heads"] if source == number
        ]
        return of_nodes + of_graph

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

    With one slope γ it is a leaky rectifier. With a slope per channel it is
    σ (v + max(0, (γ - 1) v)), where v = σ x, and σ is -1 where γ > 1, else 1. The convolution
    before it can take up the first σ, and those after it the second.
    """
    node = graph.nodes[number]
    if node["op"] != "LeakyReLU" or node.get("attrs", {}).get("act_type") != "prelu":
        return
    values = graph.values(number)
    if values is None or values[0].ndim != 1:
        return
    name, data, slopes = node["name"], tuple(node["inputs"][0][:2]), values[0]
    if len(slopes) == 1:
        options = {"act_type": "leaky", "slope": slopes[0]}
        graph.replace(number, graph.add("LeakyReLU", f"{name}_leaky", [data], **options))
        return
    signs = np.where(slopes > 1, -1.0, 1.0)
    turned = graph.scale(f"{name}_turned", data, signs)
    scaled = graph.scale(f"{name}_scaled", turned, slopes - 1)
    bent = graph.add("Activation", f"{name}_bent", [scaled], act_type="relu")
    total = graph.add("elemwise_add", name, [turned, bent])
    graph.replace(number, graph.scale(f"{name}_turned_back", total, signs))


def _fold_normalization(graph: _Graph, number: int) -> bool:
    """Let a convolution do the work of the batch normalization after it; tell whether it does."""
    affine = _factors_and_offsets(graph, number)
    if affine is None:
        return False
    before = graph.nodes[number]["inputs"][0][0]
    convolution = graph.nodes[before]
    weights = _weights(graph, before)
    if weights is None or len(graph.uses(before)) > 1:
        return False
    factors, offsets = affine
    weight, bias = weights
    name = f"{convolution['name']}_folded"
    inputs = [
        tuple(convolution["inputs"][0][:2]),
        graph.add_parameter(f"{name}_weight", (weight.T * factors).T),
        graph.add_parameter(f"{name}_bias", bias * factors + offsets),
    ]
    options = {**convolution.get("attrs", {}), "no_bias": False}
    graph.replace(number, graph.add("Convolution", name, inputs, **options))
    graph.remove(before)
    return True


def _fold_into_next(graph: _Graph, number: int) -> None:
    """Let convolutions multiply by the factors per channel before them, if they alone use it."""
    affine = _factors_and_offsets(graph, number)
    if affine is None or affine[1].any():  # an offset would have to reach the padding, too
        return
    factors, users = affine[0], [user for user, _ in graph.uses(number)]
    weights = [user is not None and _weights(graph, user) for user in users]
    if not all(weights):
        return
    for user, (weight, _) in zip(users, weights):
        node = graph.nodes[user]
        groups = int(node["attrs"].get("num_group", 1))
        grouped = weight.reshape(groups, -1, *weight.shape[1:])  # (g, O / g, I / g, ...)
        per_input = factors.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
        scaled = (grouped * per_input).reshape(weight.shape)
        node["inputs"][1][:2] = graph.add_parameter(f"{node['name']}_scaled_weight", scaled)
    graph.replace(number, tuple(graph.nodes[number]["inputs"][0][:2]))


def _rectify_at_once(graph: _Graph, number: int) -> None:
    """Let a batch normalization of a convolution apply the rectifier after it."""
    node = graph.nodes[number]
    if node["op"] != "Activation" or node["attrs"]["act_type"] != "relu":
        return
    before = node["inputs"][0][0]
    if _factors_and_offsets(graph, before) is None or len(graph.uses(before)) > 1:
        return
    normalization = graph.nodes[before]
    source = graph.nodes[normalization["inputs"][0][0]]
    # The operator that does both takes (n, channels, height, width) alone.
    if source["op"] == "Convolution" and source["attrs"]["kernel"].count(",") == 1:
        normalization["op"] = "_contrib_BatchNormWithReLU"
        graph.replace(number, (before, 0))


def _factors_and_offsets(graph: _Graph, number: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return what a batch normalization multiplies channels by and adds; None for other nodes."""
    node = graph.nodes[number]
    attrs = node.get("attrs", {})
    if (
        node["op"] != "BatchNorm"
        or {output for _, output in graph.uses(number)} != {0}
        or int(attrs.get("axis", 1)) != 1
    ):
        return None
    values = graph.values(number)
    if values is None:
        return None
    gamma, beta, mean, variance = values
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = 1 / np.sqrt(variance + float(attrs.get("eps", 1e-3)))
    if not _is_true(attrs.get("fix_gamma", "True")):
        factors = factors * gamma
    return (factors, beta - mean * factors) if np.isfinite(factors).all() else None


def _weights(graph: _Graph, number: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return weight and bias of a convolution over (n, channels, ...); None for other nodes."""
    node = graph.nodes[number]
    layout = node.get("attrs", {}).get("layout", "None")
    if node["op"] != "Convolution" or layout not in ("None", "NCHW"):
        return None
    values = graph.values(number)
    if values is None:
        return None
    weight, *bias = values
    return weight, bias[0] if bias else np.zeros(len(weight))


def _is_true(text: str) -> bool:
    return text.lower() in ("true", "1")
