"""Translate a network: its graph node by node, and the scaling of its pixels.

insightface's networks begin with (x - 127.5) / 128 for pixels x of 0 to 255. Its Python package,
and servers built on it, feed ONNX files (x - 127.5) / 127.5, unless the names of the first nodes
say that the network scales pixels itself. Both map grey, 127.5, to the zero that convolutions pad
with. They differ by a factor only, which the first convolution takes up.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Tuple

import numpy as np

from dsoftmax.eval.models import INPUT
from dsoftmax.eval.onnx_export.graph import (
    BATCH,
    Graph,
    Node,
    Shape,
    UntranslatableError,
)
from dsoftmax.eval.onnx_export.operators import OPERATORS

if TYPE_CHECKING:
    import mxnet as mx
    from onnx import ModelProto

OPSET = 13
IR_VERSION = 7  # the oldest with these operators, so that any runtime since 2020 reads it
OUTPUT = "fc1"

Source = Tuple[int, int]  # the number of a node, and of its output


class Pixels(NamedTuple):
    """What a file takes: RGB pixels x of 0 to 255 as (x - mean) / std; insightface's words."""

    mean: float
    std: float

    def __str__(self) -> str:
        if self == RAW_PIXELS:
            return "pixels of 0 to 255"
        return f"(pixels - {self.mean:g}) / {self.std:g}"


SCALED_PIXELS = Pixels(127.5, 127.5)
RAW_PIXELS = Pixels(0.0, 1.0)


def translate(
    symbol: mx.sym.Symbol,
    parameters: Mapping[str, Any],
    image_size: tuple[int, int],
    pixels: Pixels = SCALED_PIXELS,
) -> ModelProto:
    """Translate a network to ONNX.

    Parameters
    ----------
    symbol : mx.sym.Symbol
        From the input ``data``, RGB pixels of 0 to 255, to one output.
    parameters : dict of str to NDArray
    image_size : (height, width)
    pixels : Pixels
        What the file shall take. `RAW_PIXELS` are scaled by the first two nodes, which have the
        names that insightface's package looks for.

    Returns
    -------
    ModelProto
        One input ``data``, float32 (batch, 3, height, width); one output ``fc1``, (batch, D).

    Raises
    ------
    UntranslatableError
        If the network has an operator, or an attribute of one, that is not in `OPERATORS`; or an
        output that is not (batch, D).
    """
    from onnx import TensorProto, checker, helper

    translation = _Translation(symbol, parameters, image_size)
    output, width = translation.run(pixels)
    graph = helper.make_graph(
        translation.graph.nodes,
        "embedding",
        [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["batch", 3, *image_size])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", width])],
        translation.graph.initializers(),
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="dsoftmax",
    )
    checker.check_model(model)
    return model


class _Translation:
    """The nodes of a symbol, and the ONNX graph that they become.

    Parameters
    ----------
    symbol, parameters, image_size
        See `translate`.
    """

    def __init__(
        self, symbol: mx.sym.Symbol, parameters: Mapping[str, Any], image_size: tuple[int, int]
    ):
        graph = json.loads(symbol.tojson())
        self._nodes: list[dict[str, Any]] = graph["nodes"]
        self._heads: list[Source] = [tuple(head[:2]) for head in graph["heads"]]
        self._shapes = _infer_shapes(symbol, parameters, image_size)
        needed = set(symbol.list_inputs()) - {INPUT}
        arrays = {name: parameters[name].asnumpy().astype(np.float32) for name in needed}
        self.graph = Graph(INPUT, arrays)
        self._values: dict[Source, str] = {
            (number, 0): node["name"]
            for number, node in enumerate(self._nodes)
            if node["op"] == "null"
        }

    def run(self, pixels: Pixels) -> tuple[str, int]:
        """Translate all nodes; return the value of the embedding, and its width."""
        scaling = self._scaling()
        self._values[scaling.source] = self._scale(scaling, pixels)
        for number in range(len(self._nodes)):
            if (number, 0) not in self._values and number not in scaling.nodes:
                for index, value in enumerate(self._translate(number)):
                    self._values[number, index] = value
        return self._finish()

    def _translate(self, number: int) -> list[str]:
        found = self._nodes[number]
        op, name = found["op"], found["name"]
        if op not in OPERATORS:
            raise UntranslatableError(f"node {name}: operator {op} can't be translated to ONNX")
        sources = _sources(found)
        for source in sources:
            if source not in self._values:
                of = self._nodes[source[0]]["name"]
                raise UntranslatableError(f"node {name} needs output {source[1]} of {of}")
        node = Node(
            op,
            name,
            found.get("attrs", {}),
            [self._values[source] for source in sources],
            [self._shape_of(source) for source in sources],
            self._shape_of((number, 0)),
        )
        values = OPERATORS[op](node, self.graph)
        return [values] if isinstance(values, str) else values

    def _finish(self) -> tuple[str, int]:
        if len(self._heads) != 1:
            raise UntranslatableError(f"the network has {len(self._heads)} outputs, not one")
        (head,) = self._heads
        value, shape = self._values[head], self._shape_of(head)
        if not shape or shape[0] != BATCH or BATCH in shape[1:]:
            raise UntranslatableError(f"the network's output has the shape {shape}, not (batch, D)")
        if len(shape) != 2:
            value = self.graph.add("Flatten", [value], OUTPUT, axis=1)
        elif value != OUTPUT:
            value = self.graph.add("Identity", [value], OUTPUT)
        return value, math.prod(shape[1:])

    def _shape_of(self, source: Source) -> Shape:
        number, output = source
        name = self._nodes[number]["name"]
        names = (name, f"{name}_output", f"{name}_output{output}")
        return next(self._shapes[one] for one in names if one in self._shapes)

    # --- Pixels

    def _scaling(self) -> _Scaling:
        """Follow the pixels through the nodes that add or multiply one number."""
        number = next(n for n, node in enumerate(self._nodes) if node["name"] == INPUT)
        nodes, factor, offset = [], 1.0, 0.0
        while True:
            users = self._users((number, 0))
            step = _affine(self._nodes[users[0]]) if len(users) == 1 else None
            if step is None:
                return _Scaling((number, 0), nodes, factor, offset)
            (number,) = users
            nodes.append(number)
            factor, offset = factor * step[0], offset * step[0] + step[1]

    def _scale(self, scaling: _Scaling, pixels: Pixels) -> str:
        """Add what makes the network's pixels of the file's; return their value."""
        graph = self.graph
        if pixels == RAW_PIXELS:
            centre = graph.constant("centre", -scaling.offset / scaling.factor)
            centred = graph.add("Sub", [INPUT, centre], "centred", label="Sub")
            factor = graph.constant("factor", scaling.factor)
            return graph.add("Mul", [centred, factor], "scaled", label="Mul")
        factor = scaling.factor * pixels.std
        offset = scaling.factor * pixels.mean + scaling.offset
        if offset == 0 and self._fold(scaling.source, factor):
            return INPUT
        scaled = graph.add("Mul", [INPUT, graph.constant("factor", factor)], "scaled")
        return graph.add("Add", [scaled, graph.constant("offset", offset)], "shifted")

    def _fold(self, source: Source, factor: float) -> bool:
        """Let convolutions multiply their input by a factor; tell whether they can."""
        users = self._users(source)
        weights = {_sources(self._nodes[user])[1] for user in users if self._is_convolution(user)}
        users_of_weights = {user for weight in weights for user in self._users(weight)}
        if source in self._heads or users_of_weights != set(users):
            return False
        for weight in weights:
            self.graph.scale(self._values[weight], factor)
        return True

    def _is_convolution(self, number: int) -> bool:
        return self._nodes[number]["op"] == "Convolution"

    def _users(self, source: Source) -> list[int]:
        return [number for number, node in enumerate(self._nodes) if source in _sources(node)]


class _Scaling(NamedTuple):
    """What a network does to pixels before anything else: it multiplies and adds numbers.

    Attributes
    ----------
    source : Source
        The scaled pixels.
    nodes : list of int
        The nodes that scale.
    factor, offset : float
    """

    source: Source
    nodes: list[int]
    factor: float
    offset: float


def _affine(node: dict[str, Any]) -> tuple[float, float] | None:
    """Return the factor and the offset by which a node changes its input; None if it does more."""
    attributes = node.get("attrs", {})
    if node["op"] == "_copy" or (node["op"], attributes.get("dtype")) == ("Cast", "float32"):
        return 1.0, 0.0
    scalar = float(attributes.get("scalar", 0))
    steps = {
        "_minus_scalar": (1.0, -scalar),
        "_plus_scalar": (1.0, scalar),
        "_mul_scalar": (scalar, 0.0),
        "_div_scalar": (1 / scalar if scalar else math.inf, 0.0),
    }
    return steps.get(node["op"])


def _sources(node: dict[str, Any]) -> list[Source]:
    return [tuple(source[:2]) for source in node["inputs"]]


def _infer_shapes(
    symbol: mx.sym.Symbol, parameters: Mapping[str, Any], image_size: tuple[int, int]
) -> dict[str, Shape]:
    """Return the shape of each value; lengths of 1 and 2 for such batches are `BATCH`."""
    internals = symbol.get_internals()
    known = {name: parameters[name].shape for name in set(symbol.list_inputs()) - {INPUT}}
    of_one, of_two = (
        internals.infer_shape_partial(**{INPUT: (batch, 3, *image_size)}, **known)[1]
        for batch in (1, 2)
    )
    shapes: dict[str, Shape] = {}
    for name, *both in zip(internals.list_outputs(), of_one, of_two):
        shapes[name] = tuple(BATCH if pair == (1, 2) else pair[0] for pair in zip(*both))
        if tuple(2 if length == BATCH else length for length in shapes[name]) != tuple(both[1]):
            raise UntranslatableError(f"{name} mixes the axis of the batch with others")
    return shapes
