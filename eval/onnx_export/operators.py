"""How each of MXNet's operators is written with ONNX's, version 13 of its operators.

Each function adds to the graph what stands for one node of a symbol, in inference, and returns the
values of the node's outputs. A new operator is a function and a line in `OPERATORS`.
"""

from __future__ import annotations

import functools
import math
from typing import Callable

import numpy as np

from dsoftmax.eval.onnx_export.graph import Graph, Node

Translator = Callable[[Node, Graph], "str | list[str]"]


def same(node: Node, graph: Graph) -> str:
    """Leave out a node that changes nothing in inference."""
    return node.inputs[0]


def dropout(node: Node, graph: Graph) -> str:
    """Leave out a node that acts in training only."""
    node.require("mode", "training", "training")
    return node.inputs[0]


def cast(node: Node, graph: Graph) -> str:
    """Leave out a change of type: all numbers are float32."""
    node.require("dtype", "float32", "float32")
    return node.inputs[0]


def direct(op: str) -> Translator:
    """Return a translator to one operator that takes the same inputs."""
    return lambda node, graph: graph.add(op, node.inputs, node.name)


def with_scalar(op: str, is_reversed: bool = False) -> Translator:
    """Return a translator of an operator that takes a number as its attribute."""

    def translate(node: Node, graph: Graph) -> str:
        inputs = [node.inputs[0], graph.constant(f"{node.name}_scalar", node.number("scalar", 0))]
        return graph.add(op, inputs[::-1] if is_reversed else inputs, node.name)

    return translate


def square(node: Node, graph: Graph) -> str:
    """Multiply by itself."""
    return graph.add("Mul", node.inputs * 2, node.name)


def convolution(node: Node, graph: Graph) -> str:
    """Convolve images."""
    kernel = node.integers("kernel")
    axes = len(kernel)
    node.require("layout", "None", "None", "NCW", "NCHW")
    return graph.add(
        "Conv",
        node.inputs,
        node.name,
        kernel_shape=kernel,
        strides=node.integers("stride", [1] * axes),
        dilations=node.integers("dilate", [1] * axes),
        pads=node.integers("pad", [0] * axes) * 2,
        group=node.integer("num_group", 1),
    )


def batch_norm(node: Node, graph: Graph) -> str:
    """Normalize by the moving averages."""
    if node.integer("axis", 1) not in (1, 1 - len(node.shape)):
        raise node.refusal(f"axis={node.text('axis', '1')}; axis can be 1")
    data, gamma, *others = node.inputs
    if node.flag("fix_gamma", True):
        gamma = graph.constant(f"{node.name}_ones", np.ones(node.shape[1]))
    epsilon = node.number("eps", 1e-3)
    return graph.add("BatchNormalization", [data, gamma, *others], node.name, epsilon=epsilon)


ACTIVATIONS = {
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "softrelu": "Softplus",
    "softsign": "Softsign",
    "tanh": "Tanh",
}


def activation(node: Node, graph: Graph) -> str:
    """Apply one of `ACTIVATIONS`."""
    kind = node.require("act_type", "", *ACTIVATIONS)
    return graph.add(ACTIVATIONS[kind], node.inputs, node.name)


def leaky_relu(node: Node, graph: Graph) -> str:
    """Rectify with a slope, which may be learnt."""
    kind = node.require("act_type", "leaky", "prelu", "leaky", "elu", "selu", "rrelu")
    if kind == "prelu":
        slopes = graph.array(node, 1)
        if slopes.ndim == 1 and len(node.shape) > 1:
            # ONNX aligns shapes at the last axis, MXNet at the channels'.
            slopes = slopes.reshape(-1, *[1] * (len(node.shape) - 2))
        inputs = [node.inputs[0], graph.constant(f"{node.name}_slopes", slopes)]
        return graph.add("PRelu", inputs, node.name)
    if kind == "selu":
        return graph.add("Selu", node.inputs[:1], node.name)
    slope = node.number("slope", 0.25)
    if kind == "rrelu":  # random in training, their mean in inference
        slope = (node.number("lower_bound", 0.125) + node.number("upper_bound", 0.334)) / 2
    return graph.add(
        "Elu" if kind == "elu" else "LeakyRelu", node.inputs[:1], node.name, alpha=slope
    )


def pooling(node: Node, graph: Graph) -> str:
    """Pool windows, or all places of a feature map."""
    kind = node.require("pool_type", "max", "max", "avg")
    node.require("layout", "None", "None", "NCW", "NCHW")
    if node.flag("global_pool"):
        return graph.add(f"Global{POOLS[kind]}", node.inputs, node.name)
    convention = node.require("pooling_convention", "valid", "valid", "full")
    kernel = node.integers("kernel")
    strides = node.integers("stride", [1] * len(kernel))
    before = node.integers("pad", [0] * len(kernel))
    after = list(before)
    lengths = node.input_shapes[0][2:]
    if convention == "full":  # a last window that begins in the image counts, even if it leaves it
        after = [
            (out - 1) * stride + window - length - pad
            for out, stride, window, length, pad in zip(
                node.shape[2:], strides, kernel, lengths, before
            )
        ]
    options = {"kernel_shape": kernel, "strides": strides, "pads": [*before, *after]}
    counts_padding = node.flag("count_include_pad", True)
    if kind == "avg":
        options["count_include_pad"] = int(counts_padding)
    pooled = graph.add(POOLS[kind], node.inputs, node.name, **options)
    if kind == "max" or not counts_padding or after == before:
        return pooled
    # ONNX's means count what was appended for the last window, MXNet's do not.
    areas = functools.reduce(
        np.multiply.outer,
        [
            _lengths_inside(out, stride, window, length + 2 * pad)
            for out, stride, window, length, pad in zip(
                node.shape[2:], strides, kernel, lengths, before
            )
        ],
    )
    factors = graph.constant(f"{node.name}_factors", math.prod(kernel) / areas)
    return graph.add("Mul", [pooled, factors], f"{node.name}_mean")


POOLS = {"max": "MaxPool", "avg": "AveragePool"}


def _lengths_inside(count: int, stride: int, window: int, length: int) -> np.ndarray:
    """Return how much of each window along an axis is in the padded image."""
    starts = stride * np.arange(count)
    return np.minimum(starts + window, length) - starts


def adaptive_pooling(node: Node, graph: Graph) -> str:
    """Average a whole feature map."""
    if any(length != 1 for length in node.shape[2:]):
        raise node.refusal(f"output_size={node.text('output_size', '()')}; it can be 1")
    return graph.add("GlobalAveragePool", node.inputs, node.name)


def fully_connected(node: Node, graph: Graph) -> str:
    """Multiply by a matrix and add a bias."""
    data, weight, *bias = node.inputs
    rank = len(node.input_shapes[0])
    if rank > 2 and not node.flag("flatten", True):
        turned = graph.constant(f"{node.name}_turned", graph.array(node, 1).T)
        product = graph.add("MatMul", [data, turned], node.name)
        return graph.add("Add", [product, *bias], f"{node.name}_sum") if bias else product
    if rank != 2:
        data = graph.add("Flatten", [data], f"{node.name}_flat", axis=1)
    return graph.add("Gemm", [data, weight, *bias], node.name, transB=1)


def flatten(node: Node, graph: Graph) -> str:
    """Join all axes but the first."""
    return graph.add("Flatten", node.inputs, node.name, axis=1)


def reshape(node: Node, graph: Graph) -> str:
    """Change the shape to the one that MXNet inferred."""
    target = graph.constant(f"{node.name}_shape", node.shape, np.int64)
    return graph.add("Reshape", [node.inputs[0], target], node.name)


def swap_axes(node: Node, graph: Graph) -> str:
    """Exchange two axes."""
    order = list(range(len(node.shape)))
    one, other = node.integer("dim1", 0), node.integer("dim2", 0)
    order[one], order[other] = order[other], order[one]
    return graph.add("Transpose", node.inputs, node.name, perm=order)


def transpose(node: Node, graph: Graph) -> str:
    """Reorder axes."""
    axes = node.integers("axes") or list(range(len(node.shape)))[::-1]
    return graph.add("Transpose", node.inputs, node.name, perm=axes)


def concat(node: Node, graph: Graph) -> str:
    """Join along an axis."""
    return graph.add("Concat", node.inputs, node.name, axis=node.integer("dim", 1))


def slice_channel(node: Node, graph: Graph) -> list[str]:
    """Split into equal parts along an axis."""
    count, axis = node.integer("num_outputs", 1), node.integer("axis", 1)
    names = [f"{node.name}_part{number}" for number in range(count)]
    parts = graph.add_split("Split", node.inputs, names, axis=axis)
    if not node.flag("squeeze_axis"):
        return parts
    axes = graph.constant(f"{node.name}_axis", [axis], np.int64)
    return [graph.add("Squeeze", [part, axes], f"{part}_squeezed") for part in parts]


def slice_axis(node: Node, graph: Graph) -> str:
    """Take a range of one axis."""
    axis, begin, end = node.integer("axis", 0), node.integer("begin", 0), node.integers("end")
    stop = np.iinfo(np.int64).max if end is None else end[0]
    bounds = {"begin": begin, "end": stop, "axis": axis}
    inputs = [graph.constant(f"{node.name}_{key}", [at], np.int64) for key, at in bounds.items()]
    return graph.add("Slice", [*node.inputs, *inputs], node.name)


def tile(node: Node, graph: Graph) -> str:
    """Repeat along each axis."""
    repeats = node.integers("reps")
    missing = len(node.input_shapes[0]) - len(repeats)
    if missing < 0:
        raise node.refusal(f"reps={node.text('reps', '()')} for {len(node.input_shapes[0])} axes")
    inputs = [*node.inputs, graph.constant(f"{node.name}_reps", [1] * missing + repeats, np.int64)]
    return graph.add("Tile", inputs, node.name)


def pad(node: Node, graph: Graph) -> str:
    """Pad with a number, or with what is there."""
    mode = node.require("mode", "constant", "constant", "edge", "reflect")
    widths = node.integers("pad_width")
    inputs = [
        *node.inputs,
        graph.constant(f"{node.name}_widths", widths[::2] + widths[1::2], np.int64),
    ]
    if mode == "constant":
        inputs.append(graph.constant(f"{node.name}_value", node.number("constant_value", 0)))
    return graph.add("Pad", inputs, node.name, mode=mode)


def clip(node: Node, graph: Graph) -> str:
    """Limit to a range."""
    limits = [
        graph.constant(f"{node.name}_{key}", node.number(key, 0)) for key in ("a_min", "a_max")
    ]
    return graph.add("Clip", [*node.inputs, *limits], node.name)


def softmax(node: Node, graph: Graph) -> str:
    """Normalize exponentials along an axis."""
    if node.text("temperature", "None") not in ("None", "1.0") or node.flag("use_length"):
        raise node.refusal("a temperature or lengths")
    return graph.add("Softmax", node.inputs, node.name, axis=node.integer("axis", -1))


def reduce_by(op: str) -> Translator:
    """Return a translator of an operator that reduces axes."""

    def translate(node: Node, graph: Graph) -> str:
        every = range(len(node.input_shapes[0]))
        axes = sorted(axis % len(every) for axis in node.integers("axis", every))
        if node.flag("exclude"):
            axes = [axis for axis in every if axis not in axes]
        options = {"keepdims": int(node.flag("keepdims"))}
        if op == "ReduceSum":  # the one of version 13 that takes its axes as an input
            axes_input = graph.constant(f"{node.name}_axes", axes, np.int64)
            value = graph.add(op, [node.inputs[0], axes_input], node.name, **options)
        else:
            value = graph.add(op, node.inputs, node.name, axes=axes, **options)
        if node.shape == (1,) and len(axes) == len(every) and not node.flag("keepdims"):
            # MXNet has no arrays without axes.
            one = graph.constant(f"{node.name}_shape", [1], np.int64)
            value = graph.add("Reshape", [value, one], f"{node.name}_one")
        return value

    return translate


def l2_normalization(node: Node, graph: Graph) -> str:
    """Divide by lengths."""
    mode = node.require("mode", "instance", "instance", "channel", "spatial")
    rank = len(node.shape)
    axes = {
        "instance": list(range(1, rank)),
        "channel": [1],
        "spatial": list(range(2, rank)),
    }[mode]
    squares = graph.add("Mul", node.inputs * 2, f"{node.name}_squares")
    axes_input = graph.constant(f"{node.name}_axes", axes, np.int64)
    total = graph.add("ReduceSum", [squares, axes_input], f"{node.name}_total", keepdims=1)
    epsilon = graph.constant(f"{node.name}_eps", node.number("eps", 1e-10))
    length = graph.add(
        "Sqrt", [graph.add("Add", [total, epsilon], f"{node.name}_safe")], f"{node.name}_length"
    )
    return graph.add("Div", [node.inputs[0], length], node.name)


OPERATORS: dict[str, Translator] = {
    "Activation": activation,
    "BatchNorm": batch_norm,
    "BlockGrad": same,
    "Cast": cast,
    "Concat": concat,
    "Convolution": convolution,
    "Dropout": dropout,
    "Flatten": flatten,
    "FullyConnected": fully_connected,
    "L2Normalization": l2_normalization,
    "LeakyReLU": leaky_relu,
    "Pad": pad,
    "Pooling": pooling,
    "Reshape": reshape,
    "SliceChannel": slice_channel,
    "SwapAxis": swap_axes,
    "_contrib_AdaptiveAvgPooling2D": adaptive_pooling,
    "_copy": same,
    "_div_scalar": with_scalar("Div"),
    "_minus_scalar": with_scalar("Sub"),
    "_mul_scalar": with_scalar("Mul"),
    "_plus_scalar": with_scalar("Add"),
    "_power_scalar": with_scalar("Pow"),
    "_rdiv_scalar": with_scalar("Div", is_reversed=True),
    "_rminus_scalar": with_scalar("Sub", is_reversed=True),
    "add_n": direct("Sum"),
    "broadcast_add": direct("Add"),
    "broadcast_div": direct("Div"),
    "broadcast_mul": direct("Mul"),
    "broadcast_sub": direct("Sub"),
    "clip": clip,
    "elemwise_add": direct("Add"),
    "elemwise_div": direct("Div"),
    "elemwise_mul": direct("Mul"),
    "elemwise_sub": direct("Sub"),
    "exp": direct("Exp"),
    "expand_dims": reshape,
    "mean": reduce_by("ReduceMean"),
    "relu": direct("Relu"),
    "sigmoid": direct("Sigmoid"),
    "slice_axis": slice_axis,
    "softmax": softmax,
    "sqrt": direct("Sqrt"),
    "square": square,
    "sum": reduce_by("ReduceSum"),
    "tanh": direct("Tanh"),
    "tile": tile,
    "transpose": transpose,
}
