"""Networks run: heads, sizes, types of images, gradients, devices."""

import json
import os
import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from dsoftmax.recognition import networks
from dsoftmax.recognition.networks.layers import BatchNorm, PReLU
from tests.recognition.networks.families import SMALL as FAMILIES

SMALL = FAMILIES["r18"]
BATCH_NORM = ("gamma", "beta", "moving_mean", "moving_var")
BN1 = {f"bn1_{part}" for part in BATCH_NORM}
FC1 = {f"fc1_{part}" for part in BATCH_NORM}
PRE_FC1 = {"pre_fc1_weight", "pre_fc1_bias"}
OUTPUT = {"fc1_weight", "fc1_bias"}
OUTPUTS = {
    "E": BN1 | PRE_FC1 | FC1,
    "F": BN1 | OUTPUT,
    "G": BN1 | OUTPUT,
    "H": OUTPUT,
    "I": BN1 | PRE_FC1 | FC1,
    "J": PRE_FC1 | FC1,
    "FC": BN1 | PRE_FC1 | FC1,
    "GAP": BN1 | {"relu1_gamma"} | PRE_FC1 | FC1,
    "GNAP": {f"{bn}_{part}" for bn in ("bn6f", "bn6w") for part in BATCH_NORM} | PRE_FC1 | FC1,
    "GDC": {"conv_6dw7_7_conv2d_weight"}
    | {f"conv_6dw7_7_batchnorm_{part}" for part in BATCH_NORM}
    | PRE_FC1
    | FC1,
    "SFC": {"convf_weight", "reluf_gamma", "convf2_weight", "convf2_bias", "reluf2_gamma"}
    | {f"{bn}_{part}" for bn in ("bn1", "bnf", "bnf2") for part in BATCH_NORM}
    | PRE_FC1
    | FC1,
}
# A normalization follows these and takes any constant away again.
WITHOUT_EFFECT = ("pre_fc1_bias", "convf2_bias")


def as_pixels(images, dtype="uint8"):
    return mx.nd.array(images, dtype=dtype)


@pytest.mark.parametrize("output", OUTPUTS)
def test_embedding_layers(output, images, initialized):
    network = initialized("r18", embedding_size=24, output=output, **SMALL)
    assert set(network.embedding_layers.collect_params()) == OUTPUTS[output]
    pixels = as_pixels(images(6))
    with autograd.record():
        trained = network(pixels)
    trained.backward()
    assert trained.shape == network(pixels).shape == (6, 24)
    assert np.isfinite(trained.asnumpy()).all()
    assert network.features.collect_params()["conv0_weight"].grad().asnumpy().any()
    if "fc1_gamma" in OUTPUTS[output]:
        np.testing.assert_allclose(trained.asnumpy().std(axis=0), 1, rtol=0.01)


@pytest.mark.parametrize("output", ["E", "F"])
def test_dropout_is_for_training(output, images, initialized):
    pixels = as_pixels(images(6))
    plain = initialized("r18", output=output, dropout=0.0, **SMALL)
    dropping = initialized("r18", output=output, dropout=0.9, **SMALL)
    networks.load_parameters(
        dropping, {name: value.data() for name, value in plain.collect_params().items()}
    )
    assert (plain(pixels) == dropping(pixels)).asnumpy().all()
    with autograd.record():
        difference = plain(pixels) - dropping(pixels)
    assert difference.asnumpy().any()


def test_gnap_widens_to_larger_embeddings(images, initialized):
    network = initialized("r18", embedding_size=80, output="GNAP", **SMALL)
    assert network(as_pixels(images())).shape == (4, 80)
    assert network.collect_params()["convx_weight"].shape == (80, 64, 1, 1)
    assert not PRE_FC1 & set(network.collect_params())


def test_gnap_gives_each_place_the_same_weight(images):
    network = networks.create("r18", embedding_size=64, output="GNAP", **SMALL)
    pool = network.embedding_layers[1]
    features = mx.nd.array(np.random.default_rng(1).normal(size=(2, 5, 3, 3)))
    features[0, :, 0, 0] *= 100
    norms = features.norm(axis=1, keepdims=True)
    expected = (features / norms * norms.mean()).mean(axis=(2, 3), keepdims=True)
    np.testing.assert_allclose(pool(features).asnumpy(), expected.asnumpy(), rtol=1e-4)


@pytest.mark.parametrize("output", ["GDC", "SFC"])
def test_heads_of_feature_maps_refuse_pooled_features(output):
    with pytest.raises(ValueError, match=rf"{output}.*pooled"):
        networks.create("gluoncv:mobilenet0.25", output=output)


def test_the_head_without_an_embedding_is_refused():
    with pytest.raises(ValueError, match="'Z' yields a feature map, not an embedding"):
        networks.create("r18", output="Z")


def test_gdc_keeps_its_kernel_on_larger_images():
    # As insightface's, whose dense layer then takes several places of each channel.
    shapes = {}
    for side in (64, 112, 128):
        network = networks.create("m05", image_size=(side, side))
        symbol = network(mx.sym.var("data"))
        arguments, _, _ = symbol.infer_shape(data=(1, 3, side, side))
        found = dict(zip(symbol.list_arguments(), arguments))
        shapes[side] = (found["conv_6dw7_7_conv2d_weight"][2], found["pre_fc1_weight"][1])
    assert shapes == {64: (4, 512), 112: (7, 512), 128: (7, 4 * 512)}


@pytest.mark.parametrize("unit", [1, 2, 3])
@pytest.mark.parametrize("stem", [0, 1, 2])
def test_units_and_stems(unit, stem, images):
    pixels = as_pixels(images(2, 64))
    network = networks.create(
        "r18", unit=unit, input=stem, se=1, **{**SMALL, "image_size": (64, 64)}
    )
    network.initialize(networks.initializer("r18"))
    assert network(pixels).shape == (2, 512)
    # 64 pixels, halved by four stages and perhaps by the stem
    side = 2 if stem == 0 else 4
    assert network.collect_params()["pre_fc1_weight"].shape == (512, 64 * side * side)


@pytest.mark.parametrize("size", [(28, 28), (32, 32), (56, 56), (112, 112), (112, 96)])
def test_tiny_takes_any_size(size, images):
    network = networks.create("tiny")
    network.initialize(networks.initializer("tiny"))
    assert network(as_pixels(images(2, *size))).shape == (2, 128)


@pytest.mark.parametrize(
    ("name", "options", "smallest"),
    [
        ("tiny", {}, 17),
        ("y1", {}, 17),
        ("y2", {}, 17),
        ("r18", {}, 17),
        ("r50v1", {}, 17),
        ("m1", {}, 17),
        ("mnas05", {}, 17),
        ("d169", {}, 31),  # poolings
        ("vargfacenet", {}, 97),  # its last convolution sees 7x7 places
        ("r18", {"input": 0}, 33),  # its stem halves the image
        ("gluoncv:mobilenet0.25", {}, 33),
        ("gluoncv:alexnet", {}, 63),  # a pooling
    ],
)
def test_images_too_small_are_refused(name, options, smallest, capfd):
    for size in ((smallest - 1, smallest - 1), (112, smallest - 1), (1, 1)):
        height, width = size
        with pytest.raises(
            networks.ImageSizeError,
            match=f"can't take images of {height},{width}; the next size it takes is "
            f"{smallest},{smallest}",
        ):
            networks.create(name, image_size=size, **options)
    networks.create(name, image_size=(smallest, smallest), **options)
    assert capfd.readouterr().err == ""


SMALLEST = """
import mxnet as mx
from mxnet import autograd
from dsoftmax.recognition import networks

for name, side in {"tiny": 17, "y1": 17, "r18": 17, "m05": 17, "mnas025": 17, "d121": 31}.items():
    network = networks.create(name, image_size=(side, side))
    network.initialize(networks.initializer(name))
    pixels = mx.nd.random.uniform(0, 255, (8, 3, side, side))
    network(pixels)
    network.hybridize_for("cpu")
    with autograd.record():
        embeddings = network(pixels)
    embeddings.backward(mx.nd.random.normal(shape=embeddings.shape))
    mx.nd.waitall()
"""


def test_the_smallest_images_can_be_trained_on():
    # A process of its own: smaller ones crash it on some CPUs.
    subprocess.run([sys.executable, "-W", "ignore", "-c", SMALLEST], check=True, timeout=300)


def test_networks_of_one_size_name_it():
    with pytest.raises(networks.ImageSizeError, match="the smallest it takes is 32,32"):
        networks.create("gluoncv:cifar_residualattentionnet56", image_size=(112, 112))


def test_networks_of_several_outputs_are_refused():
    with pytest.raises(ValueError, match="has several outputs"):
        networks.create("gluoncv:nasnet_4_1056")


@pytest.mark.parametrize("name", ["r18", "y1", "y2"])
def test_faces_need_not_be_square(name, images):
    network = networks.create(name, image_size=(112, 96))
    network.initialize(networks.initializer(name))
    assert network(as_pixels(images(1, 112, 96))).shape == (1, network.embedding_size)


@pytest.mark.parametrize("name", [*FAMILIES, "tiny", "gluoncv:mobilenet0.25"])
def test_forms_of_running_agree(name, images, initialized):
    options = FAMILIES.get(name, {})
    network = initialized(name, **options)
    pixels = images(4, *options.get("image_size", (32, 32)))
    plain = network(as_pixels(pixels)).asnumpy()
    assert plain.dtype == np.float32
    assert plain.std() > 1e-3
    network.hybridize_for("cpu")
    tolerance = {"rtol": 1e-3, "atol": 1e-3}
    np.testing.assert_allclose(network(as_pixels(pixels)).asnumpy(), plain, **tolerance)
    as_floats = network(as_pixels(pixels, "float32")).asnumpy()
    np.testing.assert_allclose(as_floats, plain, **tolerance)


@pytest.mark.parametrize("shared_by", [0, 6])
def test_prelu_composed_is_mxnets_own(shared_by, rng):
    layer = PReLU("relu0", shared_by)
    layer.initialize()
    data = mx.nd.array(rng.normal(size=(4, 6, 5, 7)))
    data[0, 0, 0, 0] = 0
    data.attach_grad()
    to_output = mx.nd.array(rng.normal(size=data.shape))
    found = {}
    for is_composed in (False, True):
        layer.is_composed = is_composed
        with autograd.record():
            output = layer(data)
        if not is_composed:
            slopes = rng.normal(size=layer.gamma.shape)  # also negative, also above 1
            layer.gamma.set_data(mx.nd.array(slopes))
            with autograd.record():
                output = layer(data)
        output.backward(to_output)
        found[is_composed] = output, data.grad.copy(), layer.gamma.grad().copy()
    for own, composed in zip(found[False], found[True]):
        np.testing.assert_allclose(composed.asnumpy(), own.asnumpy(), rtol=1e-4, atol=1e-5)


def test_prelu_composed_stays_in_the_layout_of_onednn(rng):
    layer = PReLU("relu0")
    layer.initialize()
    layer(mx.nd.array(rng.normal(size=(2, 6, 5, 5))))
    layer.is_composed = True
    nodes = json.loads(layer(mx.sym.var("data")).tojson())["nodes"]
    per_number = {"Activation", "Convolution", "elemwise_add"}  # the others see slopes alone
    assert {node["op"] for node in nodes} == per_number | {"null", "Reshape", "_rminus_scalar"}


def test_a_compiled_network_is_saved_with_mxnets_prelu(images, initialized):
    network = initialized("y1", image_size=(32, 32), multiplier=0.5)
    network(as_pixels(images()))
    network.hybridize_for("cpu")
    network(as_pixels(images()))
    operators = [node["op"] for node in json.loads(networks.to_symbol(network).tojson())["nodes"]]
    assert operators.count("LeakyReLU") == sum(
        name.endswith("relu_gamma") for name in network.collect_params()
    )


def test_cast_changes_what_is_computed_in(images, initialized):
    network = initialized("tiny")
    pixels = as_pixels(images())
    single = network(pixels).asnumpy()
    network.cast("float64")
    double = network(pixels).asnumpy()
    assert network.collect_params()["pre_fc1_weight"].data().dtype == np.float64
    assert double.dtype == np.float32
    np.testing.assert_allclose(double, single, rtol=1e-3, atol=1e-3)
    assert (double != single).any()


def test_statistics_are_never_float16():
    network = networks.create("tiny")
    network.cast("float16")
    types = {name: np.dtype(p.dtype).name for name, p in network.collect_params().items()}
    assert types["stage1_conv_weight"] == "float16"
    assert types["stage1_bn_moving_var"] == types["stage1_bn_gamma"] == "float32"


@pytest.mark.parametrize("name", ["tiny", *FAMILIES])
def test_every_learnt_parameter_has_a_gradient(name, images, initialized, rng):
    options = FAMILIES.get(name, {})
    network = initialized(name, **options)
    with autograd.record():
        embeddings = network(as_pixels(images(8, *options.get("image_size", (32, 32)))))
        loss = (embeddings * mx.nd.array(rng.normal(size=embeddings.shape))).sum()
    loss.backward()
    for key, parameter in network.collect_params().items():
        if parameter.grad_req != "null" and key not in WITHOUT_EFFECT:
            assert parameter.grad().norm().asscalar() > 1e-6, key


@pytest.mark.parametrize("name", ["tiny", "m05", "mnas025", "d121", "vargfacenet"])
def test_training_lowers_a_loss(name, images):
    options = FAMILIES.get(name, {})
    network = networks.create(name, dropout=0.0, **options)
    network.initialize(networks.initializer(name))
    pixels = as_pixels(images(8, *options.get("image_size", (32, 32))))
    labels = mx.nd.arange(8)
    network(pixels)
    network.hybridize_for("cpu")
    classes = mx.nd.random.normal(scale=0.1, shape=(8, network.embedding_size))
    cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = gluon.Trainer(network.collect_params(), "sgd", settings)
    losses = []
    for _ in range(16):
        with autograd.record():
            loss = cross_entropy(mx.nd.dot(network(pixels), classes, transpose_b=True), labels)
        loss.backward()
        trainer.step(8)
        losses.append(loss.mean().asscalar())
    assert losses[-1] < 0.65 * losses[0]


@pytest.mark.parametrize("shape", [(8, 3, 4, 5), (8, 6)])
def test_synchronized_devices_normalize_as_one(shape, rng):
    data, gradient = (rng.normal(2, 3, shape).astype(np.float32) for _ in range(2))
    contexts = [mx.cpu(0), mx.cpu(1)]

    def run(layer, contexts):
        layer.initialize(ctx=contexts)
        pieces = gluon.utils.split_and_load(mx.nd.array(data), contexts)
        for piece in pieces:
            piece.attach_grad()
        with autograd.record():
            outputs = [layer(piece) for piece in pieces]
        autograd.backward(outputs, gluon.utils.split_and_load(mx.nd.array(gradient), contexts))
        return (
            np.concatenate([output.asnumpy() for output in outputs]),
            np.concatenate([piece.grad.asnumpy() for piece in pieces]),
            sum(piece.asnumpy() for piece in layer.gamma.list_grad()),
            *(copy.asnumpy() for copy in layer.moving_mean.list_data()[-1:]),
            *(copy.asnumpy() for copy in layer.moving_var.list_data()[-1:]),
        )

    joint = run(BatchNorm("bn"), contexts[:1])
    for found, expected in zip(run(BatchNorm("bn", sync_devices=2), contexts), joint):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


SYNCHRONIZED = f"""
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from dsoftmax.recognition import networks

options = {{"dropout": 0.0, **{SMALL}}}
contexts = [mx.cpu(0), mx.cpu(1)]
pixels = mx.nd.array(np.random.default_rng(5).integers(0, 256, (8, 3, 32, 32)))
plain = networks.create("r18", **options)
plain.initialize(networks.initializer("r18"))
plain(pixels)
network = networks.create("r18", sync_devices=2, **options)
arrays = {{name: value.data() for name, value in plain.collect_params().items()}}
networks.load_parameters(network, arrays, contexts)
with autograd.record():
    expected = plain(pixels).asnumpy()
    pieces = [network(piece) for piece in gluon.utils.split_and_load(pixels, contexts)]
found = np.concatenate([piece.asnumpy() for piece in pieces])
np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)
"""


def test_a_network_of_two_devices_normalizes_as_one():
    # A process of its own: what CPU contexts need not to hang is read when MXNet is imported.
    needed = {"MXNET_CPU_WORKER_NTHREADS": "2", "MXNET_CPU_TEMP_COPY": "64"}
    command = [sys.executable, "-c", SYNCHRONIZED]
    subprocess.run(command, env={**os.environ, **needed}, check=True, timeout=50)


def batch_norms(network):
    nodes = json.loads(network(mx.sym.var("data")).tojson())["nodes"]
    return [node for node in nodes if "BatchNorm" in node["op"]]


def test_every_norm_of_every_network_has_a_key_of_its_own():
    made = [networks.create("r18", sync_devices=2, **SMALL) for _ in range(2)]
    nodes = [node for network in made for node in batch_norms(network)]
    assert {node["op"] for node in nodes} == {"_contrib_SyncBatchNorm"}
    assert {node["attrs"]["ndev"] for node in nodes} == {"2"}
    assert len({node["attrs"]["key"] for node in nodes}) == len(nodes)


def test_networks_of_gluoncv_refuse_to_synchronize():
    with pytest.raises(ValueError, match="can't synchronize devices"):
        networks.create("gluoncv:mobilenet0.25", sync_devices=2)
