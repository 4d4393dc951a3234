"""Files of networks: symbols, parameters, and those insightface published."""

import json

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

from dsoftmax.eval.models import ModelName, load_model
from dsoftmax.recognition import networks
from dsoftmax.recognition.common.arrays import Blocks
from dsoftmax.recognition.networks.files import Classifier
from tests.recognition.networks.families import SMALL

CASES = {
    **SMALL,
    "r50v1": {**SMALL["r18"], "se": 1},
    "tiny": {},
    "gluoncv:resnet18_v1": {},
    "gluoncv:resnet18_v1b": {},
}


@pytest.mark.realdata
def test_the_published_y1_is_our_y1(real_data, images):
    prefix = str(real_data / "y1" / "model")
    network = networks.create("y1")
    found = networks.load_parameters(network, f"{prefix}-0000.params", mx.cpu())
    assert not found.missing
    assert not found.unexpected
    assert len(found.loaded) == len(network.collect_params().keys())
    pixels = images(3, 112)
    expected = load_model(ModelName(prefix, 0), [mx.cpu()])(pixels)
    embeddings = network(mx.nd.array(pixels, dtype="uint8")).asnumpy()
    np.testing.assert_allclose(embeddings, expected, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_saved_models_give_the_same_embeddings(name, tmp_path, images, initialized):
    network = initialized(name, **CASES[name])
    prefix = str(tmp_path / "model")
    networks.save_model(network, prefix, 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model-0007.params",
        "model-symbol.json",
    ]
    pixels = images(4, *CASES[name].get("image_size", (32, 32)))
    expected = network(mx.nd.array(pixels, dtype="uint8")).asnumpy()
    embed = load_model(ModelName(prefix, 7), [mx.cpu()])
    np.testing.assert_allclose(embed(pixels), expected, rtol=1e-3, atol=1e-3)


def test_saved_models_load_as_insightface_loads_them(tmp_path, images, initialized):
    network = initialized("r18", **SMALL["r18"])
    networks.save_model(network, str(tmp_path / "model"), 0)
    symbol, arguments, auxiliary = mx.model.load_checkpoint(str(tmp_path / "model"), 0)
    assert symbol.list_outputs() == ["fc1_output"]
    assert "stage1_unit1_bn1_moving_var" in auxiliary
    assert "fc1_gamma" in arguments
    output = symbol.get_internals()["fc1_output"]
    module = mx.mod.Module(output, data_names=["data"], label_names=None, context=mx.cpu())
    module.bind(data_shapes=[("data", (4, 3, 32, 32))], for_training=False)
    module.set_params(arguments, auxiliary)
    pixels = mx.nd.array(images())
    module.forward(mx.io.DataBatch([pixels]), is_train=False)
    found = module.get_outputs()[0].asnumpy()
    np.testing.assert_allclose(found, network(pixels).asnumpy(), rtol=1e-3, atol=1e-3)


def test_symbols_are_of_ordinary_operators_and_float32(tmp_path, images):
    network = networks.create("tiny", sync_devices=2)
    assert "SyncBatchNorm" in network(mx.sym.var("data")).tojson()
    text = networks.to_symbol(network).tojson()
    assert "SyncBatchNorm" not in text
    assert text == networks.to_symbol(networks.create("tiny")).tojson()
    network.cast("float16")
    assert "float16" not in networks.to_symbol(network).tojson()


def test_parameters_are_saved_in_float32(tmp_path, initialized):
    network = initialized("tiny")
    network.cast("float64")
    networks.save_model(network, str(tmp_path / "model"), 0)
    saved = mx.nd.load(str(tmp_path / "model-0000.params"))
    assert {array.dtype for array in saved.values()} == {np.float32}


def test_moving_averages_of_devices_are_saved_as_their_mean(tmp_path, images):
    contexts = [mx.cpu(0), mx.cpu(1)]
    network = networks.create("tiny")
    network.initialize(networks.initializer("tiny"), ctx=contexts)
    for context, pixels in zip(contexts, (images(), images() // 4)):
        with autograd.record():
            output = network(mx.nd.array(pixels, ctx=context))
        output.backward()  # which is when moving averages move
    networks.save_model(network, str(tmp_path / "model"), 0)
    saved = mx.nd.load(str(tmp_path / "model-0000.params"))
    parameters = network.collect_params()
    means = [copy.asnumpy() for copy in parameters["stage1_bn_moving_mean"].list_data()]
    assert (means[0] != means[1]).any()
    np.testing.assert_allclose(saved["aux:stage1_bn_moving_mean"].asnumpy(), np.mean(means, axis=0))
    weight = parameters["stage1_conv_weight"].data(contexts[0]).asnumpy()
    assert (saved["arg:stage1_conv_weight"].asnumpy() == weight).all()


def test_the_graph_is_made_once(tmp_path, initialized, monkeypatch):
    """MXNet keeps memory of every graph that it writes or reads as JSON."""
    network, prefix = initialized("tiny"), str(tmp_path / "model")
    networks.save_model(network, prefix, 0)
    graph = (tmp_path / "model-symbol.json").read_bytes()
    monkeypatch.setattr(mx.sym.Symbol, "tojson", None)
    monkeypatch.setattr(mx.sym, "load_json", None)
    networks.save_model(network, prefix, 1)
    assert (tmp_path / "model-symbol.json").read_bytes() == graph


def test_each_classifier_has_its_graph(tmp_path, initialized):
    network, prefix = initialized("tiny"), str(tmp_path / "model")
    for rows, scale in ((3, 16.0), (4, 16.0), (4, 32.0)):
        weights = np.ones((rows, network.embedding_size), np.float32)
        weights = Blocks(weights.shape, [weights])
        networks.save_model(network, prefix, 0, classifier=Classifier(weights, scale, True))
        nodes = json.loads((tmp_path / "model-symbol.json").read_text())["nodes"]
        named = {node["name"]: node.get("attrs", {}) for node in nodes}
        assert named["fc7"]["num_hidden"] == str(rows)
        scales = [node["attrs"]["scalar"] for node in nodes if node["op"] == "_mul_scalar"]
        assert float(scales[-1]) == scale
    networks.save_model(network, prefix, 0)
    assert b"fc7" not in (tmp_path / "model-symbol.json").read_bytes()


def test_a_full_disk_leaves_the_old_files(tmp_path, initialized, largest_file):
    network = initialized("tiny")
    prefix = str(tmp_path / "model")
    networks.save_model(network, prefix, 0)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    size = len(before[tmp_path / "model-0000.params"])
    for parameter in network.collect_params().values():
        parameter.set_data(parameter.data() + 1)
    message = f"model-0000.params: .*: {size:,} bytes are needed, .* are free"
    with largest_file(size - 1), pytest.raises(OSError, match=message):
        networks.save_model(network, prefix, 0)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("is_initialized", [False, True])
def test_loading_on_two_devices(is_initialized, tmp_path, images, initialized):
    trained = initialized("tiny")
    networks.save_model(trained, str(tmp_path / "model"), 0)
    contexts = [mx.cpu(0), mx.cpu(1)]
    network = networks.create("tiny")
    if is_initialized:
        network.initialize(ctx=contexts)
    found = networks.load_parameters(
        network, tmp_path / "model-0000.params", None if is_initialized else contexts
    )
    assert (found.missing, found.unexpected) == ([], [])
    pixels = images()
    expected = trained(mx.nd.array(pixels)).asnumpy()
    for context in contexts:
        embeddings = network(mx.nd.array(pixels, ctx=context)).asnumpy()
        np.testing.assert_allclose(embeddings, expected, rtol=1e-3, atol=1e-3)


def test_what_does_not_fit_is_reported_and_left_alone(initialized):
    network = initialized("tiny")
    before = network.collect_params()["stage1_conv_weight"].data().asnumpy()
    arrays = {name: value.data() for name, value in network.collect_params().items()}
    arrays["stage1_conv_weight"] = mx.nd.zeros((2, 3, 3, 3))
    del arrays["fc1_beta"]
    arrays["other"] = arrays["fc7_weight"] = arrays["arg:fc7_bias"] = mx.nd.zeros(3)
    found = networks.load_parameters(network, arrays)
    shape = before.shape
    assert set(found.missing) == {
        "fc1_beta",
        f"stage1_conv_weight {shape}, in the file (2, 3, 3, 3)",
    }
    assert found.unexpected == ["other"]
    assert len(found.loaded) == len(network.collect_params().keys()) - 2
    assert (network.collect_params()["stage1_conv_weight"].data().asnumpy() == before).all()


@pytest.mark.parametrize(
    ("name", "own", "other"),
    [("y1", "fc1_weight", "pre_fc1_weight"), ("r18", "pre_fc1_weight", "fc1_weight")],
)
def test_both_names_of_the_last_weight_are_known(name, own, other, initialized):
    network = initialized(name, **CASES[name])
    arrays = {f"arg:{key}": value.data() for key, value in network.collect_params().items()}
    arrays[f"arg:{other}"] = arrays.pop(f"arg:{own}") + 1
    expected = arrays[f"arg:{other}"].asnumpy()
    assert networks.load_parameters(network, arrays)[1:] == ([], [])
    assert (network.collect_params()[own].data().asnumpy() == expected).all()


def test_networks_of_gluon_are_known_by_any_number(initialized):
    network = initialized("mnas025", **CASES["mnas025"])
    arrays = {
        f"arg:{name.replace('mnasnet0_', 'mnasnet12_')}": value.data() + 1
        for name, value in network.collect_params().items()
    }
    assert networks.load_parameters(network, arrays)[1:] == ([], [])
    own, other = "mnasnet0_stage5_3_conv0_weight", "arg:mnasnet12_stage5_3_conv0_weight"
    assert (network.collect_params()[own].data() == arrays[other]).asnumpy().all()


def test_broken_files_are_named(tmp_path):
    path = tmp_path / "model-0000.params"
    path.write_bytes(b"no parameters")
    with pytest.raises(ValueError, match=r"model-0000\.params: not a parameter file"):
        networks.load_parameters(networks.create("tiny"), path)
    mx.nd.save(str(path), [mx.nd.zeros(2)])
    with pytest.raises(ValueError, match="have no names"):
        networks.load_parameters(networks.create("tiny"), path)


def node_names(symbol):
    return [node["name"] for node in json.loads(symbol.tojson())["nodes"] if node["op"] != "null"]


@pytest.mark.realdata
def test_nodes_are_named_as_in_the_published_y1(real_data):
    published = mx.sym.load(str(real_data / "y1" / "model-symbol.json"))
    assert node_names(networks.to_symbol(networks.create("y1"))) == node_names(published)


def test_nodes_are_named_as_in_the_residual_networks_of_insightface():
    network = networks.create("r18", **{**SMALL["r18"], "se": 1})
    unit = ["bn1", "conv1", "bn2", "relu1", "conv2", "bn3"]
    excitation = ["pool1", "conv1", "relu1", "conv2", "sigmoid"]
    expected = ["_minusscalar0", "_mulscalar0", "conv0", "bn0", "relu0"]
    for number in range(4):
        stage = f"stage{number + 1}_unit1"
        expected += [f"{stage}_{name}" for name in unit]
        expected += [f"{stage}_se_{name}" for name in excitation]
        expected += [f"broadcast_mul{number}", f"{stage}_conv1sc", f"{stage}_sc", f"_plus{number}"]
    expected += ["bn1", "dropout0", "pre_fc1", "fc1"]
    assert node_names(networks.to_symbol(network)) == expected


@pytest.mark.parametrize("name", CASES)
def test_names_of_nodes_are_unique_and_independent_of_other_networks(name):
    networks.create(name, **CASES[name])
    names = node_names(networks.to_symbol(networks.create(name, **CASES[name])))
    assert len(set(names)) == len(names)
    assert names[:2] == ["_minusscalar0", "_mulscalar0"]
    assert names[-1] == "fc1"
