"""An ONNX graph under construction, and the nodes of a symbol that become part of it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Mapping, Sequence, Tuple

import numpy as np

if TYPE_CHECKING:
    from onnx import NodeProto, TensorProto

Shape = Tuple[int, ...]
"""A shape, with `BATCH` for the axis of the batch."""

BATCH = -1  # as ONNX's Reshape writes a length that it shall infer


class UntranslatableError(ValueError):
    """A network has a node that can't be translated; the message names it."""


@dataclass
class Node:
    """A node of a symbol.

    Attributes
    ----------
    op, name : str
    attributes : dict of str to str
        As the symbol's JSON has them: those that differ from MXNet's defaults.
    inputs : list of str
        The ONNX values that stand for its inputs.
    input_shapes : list of Shape
    shape : Shape
        Of its first output.
    """

    op: str
    name: str
    attributes: Mapping[str, str]
    inputs: list[str]
    input_shapes: list[Shape]
    shape: Shape

    def text(self, key: str, default: str) -> str:
        """Return an attribute as it is."""
        return self.attributes.get(key, default)

    def number(self, key: str, default: float) -> float:
        """Return an attribute as a float."""
        return float(self.attributes.get(key, default))

    def flag(self, key: str, default: bool = False) -> bool:
        """Return an attribute as a truth value."""
        return self.attributes.get(key, str(default)).lower() in ("true", "1")

    def integers(self, key: str, default: Sequence[int] | None = None) -> list[int] | None:
        """Return an attribute as integers; the default if it is absent, None or empty."""
        value = ast.literal_eval(self.attributes.get(key, "None"))
        if value is None or value == ():
            return None if default is None else list(default)
        return [int(one) for one in value] if isinstance(value, (tuple, list)) else [int(value)]

    def integer(self, key: str, default: int) -> int:
        """Return an attribute as an integer."""
        return self.integers(key, [default])[0]

    def require(self, key: str, default: str, *legal: str) -> str:
        """Return an attribute; raise an error unless its value can be translated."""
        value = self.text(key, default)
        if value not in legal:
            raise self.refusal(f"{key}={value}; {key} can be {', '.join(legal)}")
        return value

    def refusal(self, why: str) -> UntranslatableError:
        """Return the error to raise if the node can't be translated."""
        return UntranslatableError(
            f"node {self.name}: operator {self.op} can't be translated to ONNX with {why}"
        )


class Graph:
    """Collects ONNX nodes and the arrays that they use.

    Parameters
    ----------
    input : str
        Name of its input.
    arrays : dict of str to (...) array
        The parameters of the network; only those that a node uses become part of the file.
    """

    def __init__(self, input: str, arrays: Mapping[str, np.ndarray]):
        self.nodes: list[NodeProto] = []
        self._arrays = dict(arrays)
        self._values: set[str] = {input, *arrays}

    def add(
        self, op: str, inputs: Sequence[str], name: str, label: str | None = None, **attributes: Any
    ) -> str:
        """Add a node with one output; return the name of that value.

        Parameters
        ----------
        op : str
            ONNX's.
        inputs : sequence of str
        name : str
            Of the value; a suffix tells it apart from others.
        label : str, optional
            Name of the node. By default the value's after a slash, as PyTorch writes it: from
            other names insightface's package would conclude that the network scales its pixels.
        **attributes
        """
        return self.add_split(op, inputs, [name], label, **attributes)[0]

    def add_split(
        self,
        op: str,
        inputs: Sequence[str],
        names: Sequence[str],
        label: str | None = None,
        **attributes: Any,
    ) -> list[str]:
        """Add a node with several outputs; return their names. See `add`."""
        from onnx import helper

        values = [self._unused(name) for name in names]
        label = label or f"/{values[0]}"
        self.nodes.append(helper.make_node(op, inputs, values, name=label, **attributes))
        return values

    def constant(self, name: str, value: Any, dtype: type = np.float32) -> str:
        """Add an array; return its name."""
        name = self._unused(name)
        self._arrays[name] = np.asarray(value, dtype)
        return name

    def array(self, node: Node, number: int) -> np.ndarray:
        """Return an input of a node that must be a parameter."""
        try:
            return self._arrays[node.inputs[number]]
        except KeyError:
            raise node.refusal(f"an input {number} that is not a parameter") from None

    def scale(self, name: str, factor: float) -> None:
        """Multiply a parameter by a factor."""
        self._arrays[name] = (self._arrays[name] * np.float64(factor)).astype(np.float32)

    def initializers(self) -> list[TensorProto]:
        """Return the arrays that nodes use."""
        from onnx import numpy_helper

        used = dict.fromkeys(value for node in self.nodes for value in node.input)
        return [
            numpy_helper.from_array(np.ascontiguousarray(self._arrays[name]), name)
            for name in used
            if name in self._arrays
        ]

    def _unused(self, name: str) -> str:
        unused, number = name, 1
        while unused in self._values:
            unused, number = f"{name}_{number}", number + 1
        self._values.add(unused)
        return unused
