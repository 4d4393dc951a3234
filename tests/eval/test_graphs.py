"""Graphs that are rewritten for CPUs compute what they did, by other operators."""

import json
import sys

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.eval import graphs
from dsoftmax.eval.models import ModelName, load_model


def prelu(data, name):
    return mx.sym.LeakyReLU(data, mx.sym.var(f"{name}_gamma"), act_type="prelu", name=name)


def convolution(data, name, channels=8, **options):
    options = {"kernel": (3, 3), "pad": (1, 1), "num_filter": channels, **options}
    return mx.sym.Convolution(data, name=name, **options)


def norm(data, name, **options):
    return mx.sym.BatchNorm(data, name=name, **options)


def face_network():
    """Return all that published networks have around a PReLU, and some that they might have."""
    data = (mx.sym.var("data") - 127.5) * 0.0078125
    one = prelu(norm(convolution(data, "conv0", no_bias=True), "bn0", fix_gamma=False), "relu0")
    two = norm(convolution(one, "conv1", num_group=8), "bn1", fix_gamma=True, eps=2e-5)
    two = norm(prelu(two, "relu1"), "bn2", fix_gamma=False)  # after no convolution
    shared = convolution(two, "conv2", stride=(2, 2), no_bias=True)
    body = prelu(norm(shared, "bn3"), "relu2") + norm(shared, "bn4") + prelu(shared, "relu3")
    body = prelu(body, "relu4")
    return prelu(mx.sym.FullyConnected(body, num_hidden=5, name="fc0"), "relu5")


def parameters_of(symbol, shape, rng, slopes):
    """Draw parameters; `slopes` is how many a PReLU has, one or one per channel."""
    arguments, _, states = symbol.infer_shape_partial(data=shape)
    names = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
    shapes = dict(zip(names, [*arguments, *states]))
    drawn = {}
    for name in names:
        if name.startswith("relu"):
            channels = 5 if name == "relu5_gamma" else 8
            value = rng.normal(0, 1.5, channels if slopes == "per channel" else 1)
        elif name.endswith("var"):
            value = rng.uniform(0.1, 3, shapes[name])
        elif name != "data":
            value = rng.normal(0, 0.4, shapes[name])
        else:
            continue
        drawn[name] = mx.nd.array(value)
    return drawn


def run(symbol, parameters, *batches):
    block = mx.gluon.SymbolBlock(symbol, mx.sym.var("data", dtype="float32"))
    for name, parameter in block.collect_params().items():
        parameter._load_init(parameters[name], [mx.cpu()])
    block.hybridize(static_alloc=True, static_shape=True)
    return [block(batch).asnumpy() for batch in batches]


def operators(symbol):
    return [
        f"{node['op']} {node.get('attrs', {}).get('act_type', '')}".strip()
        for node in json.loads(symbol.tojson())["nodes"]
    ]


def assert_same(found, expected):
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("slopes", ["per channel", "shared"])
@pytest.mark.parametrize("size", [7, 16])
def test_same_values_without_prelu(rng, slopes, size):
    symbol = face_network()
    shape = (4, 3, size, size)
    parameters = parameters_of(symbol, shape, rng, slopes)
    before = symbol.tojson(), {name: value.asnumpy() for name, value in parameters.items()}
    rewritten, others = graphs.for_cpus(symbol, parameters)
    images = mx.nd.array(rng.integers(0, 256, shape))
    batches = images, images, images[:1], images[1:]  # twice, because oneDNN keeps its layouts
    assert_same(run(rewritten, others, *batches), run(symbol, parameters, *batches))
    assert operators(symbol).count("LeakyReLU prelu") == 6
    assert "LeakyReLU prelu" not in operators(rewritten)
    if slopes == "shared":  # left are the two of conv2, which has three uses, and bn2
        assert operators(rewritten).count("BatchNorm") == 3
    assert symbol.tojson() == before[0]
    assert set(parameters) == set(before[1])
    for name, value in before[1].items():
        np.testing.assert_array_equal(parameters[name].asnumpy(), value)


def test_names_in_any_alphabet(rng):
    symbol = mx.sym.LeakyReLU(mx.sym.var("data"), mx.sym.var("größe"), act_type="prelu", name="層")
    parameters = parameters_of(symbol, (2, 3, 4, 4), rng, "per channel")
    images = mx.nd.array(rng.normal(size=(2, 3, 4, 4)))
    assert_same(run(*graphs.for_cpus(symbol, parameters), images), run(symbol, parameters, images))


@pytest.mark.parametrize("shape", [(3, 6), (2, 6, 5), (2, 6, 5, 7), (1, 6, 1, 1), (5, 1, 3, 3)])
@pytest.mark.parametrize("shared", [False, True])
def test_prelu_spelt_out(rng, shape, shared):
    slopes = rng.normal(0, 2, 1 if shared else shape[1]).astype(np.float32)
    if len(slopes) > 2:
        slopes[:3] = 0, 1, -1
    data = rng.normal(size=shape).astype(np.float32)
    data.flat[0] = 0
    symbol, parameters = graphs.for_cpus(
        prelu(mx.sym.var("data"), "relu"), {"relu_gamma": mx.nd.array(slopes)}
    )
    assert "LeakyReLU prelu" not in operators(symbol)
    factors = slopes.reshape(-1, *[1] * (len(shape) - 2))
    expected = np.where(data > 0, data, data * factors)
    (found,) = run(symbol, parameters, mx.nd.array(data))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_what_is_unknown_stays(rng):
    symbol = prelu(norm(convolution(mx.sym.var("data"), "conv0"), "bn0"), "relu0")
    full = parameters_of(symbol, (1, 3, 8, 8), rng, "per channel")
    missing = {name: value for name, value in full.items() if "gamma" not in name}
    half = {name: value.astype("float16") for name, value in full.items()}
    broken = {**full, "relu0_gamma": full["relu0_gamma"] * np.nan, "bn0_moving_var": -mx.nd.ones(8)}
    for parameters in (missing, half, broken):
        rewritten, _ = graphs.for_cpus(symbol, parameters)
        assert operators(rewritten) == operators(symbol)


def test_nothing_without_onednn(rng, monkeypatch):
    symbol = face_network()
    parameters = parameters_of(symbol, (1, 3, 16, 16), rng, "per channel")
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")
    rewritten, _ = graphs.for_cpus(symbol, parameters)
    assert operators(rewritten) == operators(symbol)


def test_two_passes_are_left_between_convolutions(rng):
    data = prelu(norm(convolution(mx.sym.var("data"), "conv0"), "bn0"), "relu0")
    data = prelu(norm(convolution(data, "conv1", num_group=8), "bn1"), "relu1")
    symbol = convolution(convolution(data, "conv2", num_group=2), "conv3", channels=4)
    parameters = parameters_of(symbol, (2, 3, 8, 8), rng, "per channel")
    for name in ("relu0_gamma", "relu1_gamma"):  # below 0, between and above 1
        parameters[name] = mx.nd.array([-2, -0.5, 0, 0.3, 1, 1.2, 2, 5])
    images = mx.nd.array(rng.normal(size=(2, 3, 8, 8)))
    rewritten, others = graphs.for_cpus(symbol, parameters)
    passes = ["_contrib_BatchNormWithReLU", "elemwise_add"]
    left = [operator for operator in operators(rewritten) if operator != "null"]
    assert left == ["Convolution", *passes, "Convolution", *passes, "Convolution", "Convolution"]
    assert_same(run(rewritten, others, images), run(symbol, parameters, images))


def test_only_for_cpus(tmp_path, rng, monkeypatch):
    symbol = face_network()
    parameters = parameters_of(symbol, (1, 3, 16, 16), rng, "per channel")
    prefix = str(tmp_path / "model")
    states = {name: parameters.pop(name) for name in symbol.list_auxiliary_states()}
    mx.model.save_checkpoint(prefix, 0, symbol, parameters, states)
    images = rng.integers(0, 256, (3, 3, 16, 16), np.uint8)
    plain = load_model(ModelName(prefix, 0), [mx.cpu()], rewrite=False)(images)
    calls = []
    monkeypatch.setattr(
        graphs, "for_cpus", lambda *args, real=graphs.for_cpus: calls.append(args) or real(*args)
    )
    for contexts in ([mx.cpu()], [mx.cpu(0), mx.cpu(1)]):
        assert_same(load_model(ModelName(prefix, 0), contexts)(images), plain)
    assert len(calls) == 2
    # There need not be a GPU, and the CUDA build of MXNet may abort without: go no further.
    monkeypatch.setattr(mx.gluon, "SymbolBlock", lambda *_: sys.exit())
    with pytest.raises(SystemExit):
        load_model(ModelName(prefix, 0), [mx.gpu()])
    assert len(calls) == 2
