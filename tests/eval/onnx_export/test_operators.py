"""Each operator, alone and with odd attributes, computes in ONNX Runtime what it does in MXNet."""

import json

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.eval.onnx_export import RAW_PIXELS, translate
from dsoftmax.eval.onnx_export.graph import UntranslatableError
from dsoftmax.eval.onnx_export.operators import ACTIVATIONS, OPERATORS

onnxruntime = pytest.importorskip("onnxruntime")

SIZE = (7, 10)
DATA = mx.sym.var("data")
FLAT = mx.sym.Flatten(DATA)
PER_CHANNEL = mx.sym.var("factors", shape=(1, 3, 1, 1))
POSITIVE = DATA * DATA + 1


def pool(**options):
    return mx.sym.Pooling(DATA, **options)


def poolings():
    for kind in ("max", "avg"):
        for convention in ("valid", "full"):
            for count_include_pad in (True, False):
                yield (
                    f"{kind} {convention} {count_include_pad}",
                    pool(
                        kernel=(3, 2),
                        stride=(2, 3),
                        pad=(1, 0),
                        pool_type=kind,
                        pooling_convention=convention,
                        count_include_pad=count_include_pad,
                    ),
                )
        yield f"{kind} defaults", pool(kernel=(2, 3), pool_type=kind)
        yield f"{kind} global", pool(kernel=(1, 1), global_pool=True, pool_type=kind)


CASES = {
    "convolution": mx.sym.Convolution(DATA, kernel=(3, 2), num_filter=5),
    "convolution with all options": mx.sym.Convolution(
        DATA,
        kernel=(3, 2),
        stride=(2, 1),
        pad=(1, 3),
        dilate=(1, 2),
        num_filter=6,
        num_group=3,
        no_bias=True,
        layout="NCHW",
    ),
    "batch norm, fixed gamma": mx.sym.BatchNorm(DATA),
    "batch norm": mx.sym.BatchNorm(DATA, fix_gamma=False, eps=0.1, axis=1),
    "batch norm of rows": mx.sym.BatchNorm(FLAT, fix_gamma=False, eps=2e-5),
    **{kind: mx.sym.Activation(DATA, act_type=kind) for kind in ACTIVATIONS},
    "prelu": mx.sym.LeakyReLU(DATA, act_type="prelu"),
    "prelu of rows": mx.sym.LeakyReLU(FLAT, act_type="prelu"),
    "prelu with one slope": mx.sym.LeakyReLU(
        DATA, mx.sym.var("slope", shape=(1,)), act_type="prelu"
    ),
    **{kind: mx.sym.LeakyReLU(DATA, act_type=kind) for kind in ("leaky", "elu", "selu")},
    "rrelu": mx.sym.LeakyReLU(DATA, act_type="rrelu")[0],
    "leaky with a slope": mx.sym.LeakyReLU(DATA, act_type="leaky", slope=0.7),
    **dict(poolings()),
    "adaptive pooling": mx.sym.contrib.AdaptiveAvgPooling2D(DATA, output_size=1),
    "dense": mx.sym.FullyConnected(DATA, num_hidden=4),
    "dense of rows": mx.sym.FullyConnected(FLAT, num_hidden=4, no_bias=True),
    "dense of the last axis": mx.sym.FullyConnected(DATA, num_hidden=4, flatten=False),
    "dense of the last axis, no bias": mx.sym.FullyConnected(
        DATA, num_hidden=4, flatten=False, no_bias=True
    ),
    "dropout": mx.sym.Dropout(DATA, p=0.4),
    "cast": mx.sym.Cast(mx.sym.tanh(DATA), dtype="float32"),
    "copy": mx.sym.identity(mx.sym.tanh(DATA)),
    "no gradient": mx.sym.BlockGrad(mx.sym.tanh(DATA)),
    "concat": mx.sym.concat(DATA, mx.sym.tanh(DATA), DATA, dim=1),
    "concat of the last axis": mx.sym.concat(DATA, DATA, dim=-1),
    "parts": mx.sym.concat(*list(mx.sym.split(DATA, num_outputs=3, axis=1))[::-1], dim=3),
    "squeezed parts": mx.sym.concat(
        *mx.sym.split(DATA, num_outputs=3, axis=1, squeeze_axis=True), dim=2
    ),
    "part of an axis": mx.sym.slice_axis(DATA, axis=2, begin=1, end=-2),
    "rest of an axis": mx.sym.slice_axis(DATA, axis=-1, begin=3, end=None),
    "reshape": mx.sym.reshape(DATA, shape=(0, -1)),
    "reshape with codes": mx.sym.reshape(DATA, shape=(0, -3, -2)),
    "shuffle": mx.sym.reshape(
        mx.sym.SwapAxis(mx.sym.reshape(DATA, shape=(0, 0, 0, -4, 2, 5)), dim1=3, dim2=4),
        shape=(0, 0, 0, -3),
    ),
    "new axis": mx.sym.expand_dims(DATA, axis=2),
    "transpose": mx.sym.transpose(DATA, axes=(0, 2, 3, 1)),
    "tile": mx.sym.tile(mx.sym.sum(DATA, axis=1, keepdims=True), reps=(1, 3, 1, 2)),
    "tile of the last axes": mx.sym.tile(DATA, reps=(2, 1)),
    **{
        f"pad {mode}": mx.sym.pad(
            DATA, mode=mode, pad_width=(0, 0, 0, 0, 1, 2, 3, 0), constant_value=1.5
        )
        for mode in ("constant", "edge", "reflect")
    },
    "clip": mx.sym.clip(DATA, -0.5, 0.25),
    "softmax": mx.sym.softmax(DATA, axis=1),
    "sum of all places": mx.sym.sum(DATA, axis=(2, 3)),
    "sum of all but": mx.sym.sum(DATA, axis=(0, 2), exclude=True),
    "sum of the last": mx.sym.sum(DATA, axis=-1, keepdims=True),
    "mean": mx.sym.mean(DATA, axis=(1, -1)),
    "mean of the batch": mx.sym.broadcast_mul(DATA, mx.sym.mean(DATA)),
    "sum of the batch": mx.sym.broadcast_mul(DATA, mx.sym.sum(DATA, axis=())),
    **{
        f"lengths {mode}": mx.sym.L2Normalization(DATA, mode=mode, eps=0.1)
        for mode in ("instance", "channel", "spatial")
    },
    "scalars": (3 - (2 / (POSITIVE * 4 - 0.5)) / 3) ** 2,
    "elementwise": (DATA + POSITIVE) * (DATA - POSITIVE) / POSITIVE,
    "broadcast": mx.sym.broadcast_div(
        mx.sym.broadcast_sub(
            mx.sym.broadcast_add(mx.sym.broadcast_mul(DATA, PER_CHANNEL), PER_CHANNEL), DATA
        ),
        mx.sym.sum(POSITIVE, axis=1, keepdims=True),
    ),
    "functions": mx.sym.add_n(
        mx.sym.relu(DATA),
        mx.sym.sigmoid(DATA),
        mx.sym.tanh(DATA),
        mx.sym.exp(DATA),
        mx.sym.square(DATA),
        mx.sym.sqrt(POSITIVE),
    ),
}


def operators_of(symbol):
    return {node["op"] for node in json.loads(symbol.tojson())["nodes"]} - {"null"}


def draw_parameters(symbol, rng):
    """Return random parameters of a symbol, variances above 0."""
    arguments, _, auxiliary = symbol.infer_shape(data=(1, 3, *SIZE))
    names = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
    return {
        name: mx.nd.array(rng.uniform(0.5, 2, shape) * (1 if "var" in name else -1))
        for name, shape in zip(names, [*arguments, *auxiliary])
        if name != "data"
    }


def run_mxnet(symbol, parameters, images):
    block = mx.gluon.SymbolBlock(symbol, mx.sym.var("data", dtype="float32"))
    for name, parameter in block.collect_params().items():
        parameter._load_init(parameters[name], mx.cpu())
    return block(mx.nd.array(images)).asnumpy()


def run_onnx(model, images):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"data": images})
    return found


@pytest.mark.parametrize("case", CASES)
def test_onnx_computes_what_mxnet_computes(case, rng):
    symbol = CASES[case]
    parameters = draw_parameters(symbol, rng)
    model = translate(symbol, parameters, SIZE, RAW_PIXELS)
    for count in (1, 3):
        images = rng.normal(0, 1, (count, 3, *SIZE)).astype(np.float32)
        expected = run_mxnet(symbol, parameters, images)
        found = run_onnx(model, images)
        assert found.ndim == 2
        np.testing.assert_allclose(found, expected.reshape(count, -1), rtol=1e-4, atol=1e-5)


def test_every_operator_has_a_case():
    assert set(OPERATORS) == set().union(*map(operators_of, CASES.values()))


@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        (mx.sym.sin(DATA, name="odd"), "node odd: operator sin can't be translated to ONNX"),
        (mx.sym.LeakyReLU(DATA, act_type="gelu", name="bend"), "node bend: .* act_type=gelu"),
        (mx.sym.Cast(mx.sym.tanh(DATA), dtype="float16", name="half"), "node half: .*float16"),
        (mx.sym.Dropout(DATA, mode="always", name="drop"), "node drop: .* mode=always"),
        (mx.sym.BatchNorm(DATA, axis=3, name="bn"), "node bn: .* axis=3"),
        (pool(kernel=(2, 2), pool_type="lp", p_value=2, name="pool"), "node pool: .*=lp"),
        (
            mx.sym.reshape(DATA, shape=(-1, 7), name="mixed"),
            "mixed_output mixes",
        ),
        (
            mx.sym.LeakyReLU(DATA, mx.sym.sum(DATA, axis=(0, 2, 3)), act_type="prelu", name="p"),
            "node p: .* not a parameter",
        ),
        (mx.sym.Group([mx.sym.tanh(DATA), DATA]), "2 outputs"),
        (mx.sym.sum(DATA), "shape"),
    ],
)
def test_what_is_not_known_is_refused_by_name(symbol, message, rng):
    with pytest.raises(UntranslatableError, match=message):
        translate(symbol, draw_parameters(symbol, rng), SIZE)
