"""Load the graph of a network from ``prefix-symbol.json``, and nothing but that of a network.

MXNet believes what a file says: some of its operators take an address in memory as an attribute,
others call back into a program. Only operators that networks are made of are accepted.
"""

from __future__ import annotations

import json
import re
from typing import Any

from dsoftmax.recognition.common.preflight import mxnet

VARIABLE = "null"  # the operator of a node that is an input or a parameter
LAYERS = """
    Activation BatchNorm BatchNorm_v1 Concat Convolution Convolution_v1 Deconvolution Dropout
    Flatten FullyConnected GroupNorm InstanceNorm L2Normalization LRN LayerNorm LeakyReLU Pad
    Pooling Pooling_v1 SliceChannel SoftmaxActivation SoftmaxOutput UpSampling
    _contrib_AdaptiveAvgPooling2D _contrib_BilinearResize2D _contrib_DeformableConvolution
    _contrib_SyncBatchNorm
"""
ARITHMETIC = """
    abs add_n broadcast_add broadcast_div broadcast_like broadcast_maximum broadcast_minimum
    broadcast_mul broadcast_power broadcast_sub ceil clip cos arccos sin elemwise_add
    elemwise_div elemwise_mul elemwise_sub erf exp floor hard_sigmoid log log_softmax max mean
    min negative norm relu round rsqrt sigmoid softmax softsign sqrt square sum tanh _div
    _div_scalar _maximum _maximum_scalar _minimum _minimum_scalar _minus _minus_scalar _mul
    _mul_scalar _plus _plus_scalar _power _power_scalar _rdiv_scalar _rminus_scalar _Div
    _DivScalar _Maximum _MaximumScalar _Minimum _MinimumScalar _Minus _MinusScalar _Mul
    _MulScalar _Plus _PlusScalar _Power _PowerScalar _RDivScalar _RMinusScalar _grad_add
    _greater_equal_scalar _greater_scalar _lesser_equal_scalar _lesser_scalar batch_dot dot
    one_hot pick where
"""
SHAPES = """
    BlockGrad Cast Reshape amp_cast amp_multicast broadcast_axes broadcast_axis broadcast_to
    cast crop depth_to_space expand_dims flatten identity make_loss MakeLoss ones_like reshape
    reshape_like reverse slice slice_axis slice_like space_to_depth split squeeze stack
    stop_gradient swapaxes SwapAxis tile transpose zeros_like _contrib_arange_like _copy _ones
    _split_v2 _zeros
"""
OPERATORS = frozenset(f"{LAYERS} {ARITHMETIC} {SHAPES}".split())


def load_symbol(path: str) -> Any:
    """Load the graph of a network.

    Parameters
    ----------
    path : str
        A ``-symbol.json`` of any release of MXNet.

    Returns
    -------
    mx.sym.Symbol

    Raises
    ------
    ValueError
        If the file is no graph, or one with operators that no network needs.
    """
    mx = mxnet()
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a symbol MXNet can read: it is no text") from None
    _check_operators(text, path)
    try:
        return mx.sym.load_json(text)
    except mx.MXNetError as error:
        reason = re.sub(r"\s+", " ", str(error)).rpartition("Error: ")[2]
        raise ValueError(f"{path}: not a symbol MXNet can read: {reason[:200]}") from None


def _check_operators(text: str, path: str) -> None:
    try:
        nodes = json.loads(text)["nodes"]
        operators = {node["op"]: node["name"] for node in nodes}
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"{path}: not a symbol MXNet can read: it is no list of nodes") from None
    for operator, name in operators.items():
        if operator not in OPERATORS and operator != VARIABLE:
            raise ValueError(
                f"{path}: refused: the node {name!r} is of the operator {operator!r}, which no "
                "network needs; nothing of it was run. Don't use this file"
            )
    if any(node.get("subgraphs") for node in nodes):
        raise ValueError(f"{path}: refused: a node holds a graph of its own, as no network does")
