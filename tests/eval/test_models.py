"""Networks are found by the names insightface's users write, and run on any number of images."""

import json
import os

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.eval.models import (
    ModelName,
    find_models,
    labels_of,
    load_model,
    missing_model,
    parse_models,
)


def pictures(rng, count, size=32):
    return rng.integers(0, 256, (count, 3, size, size), np.uint8)


def numpy_network(prefix, epoch, images):
    """Spell the network of the fixture out."""
    saved = mx.nd.load(f"{prefix}-{epoch:04d}.params")
    weight, bias, fc_weight, fc_bias = (
        saved[f"arg:{name}"].asnumpy()
        for name in ("conv0_weight", "conv0_bias", "fc1_weight", "fc1_bias")
    )
    pixels = (images.astype(np.float64) - 127.5) / 128
    windows = np.lib.stride_tricks.sliding_window_view(pixels, (5, 5), axis=(2, 3))[:, :, ::4, ::4]
    body = np.tanh(np.einsum("ncyxij,kcij->nkyx", windows, weight) + bias[:, None, None])
    return body.mean(axis=(2, 3)) @ fc_weight.T + fc_bias


class TestNames:
    def test_forms(self, symbol_model):
        assert parse_models("a/b,3") == [ModelName("a/b", 3)]
        assert parse_models("a,b,3|12") == [ModelName("a,b", 3), ModelName("a,b", 12)]
        assert parse_models("p,1|q,2") == [ModelName("p", 1), ModelName("q", 2)]
        assert parse_models("net.onnx") == [ModelName("net.onnx")]
        for epoch in (1, 12, 10000):
            prefix = symbol_model("model", epoch)
        symbol_model("model-other", 7)
        assert [name.epoch for name in parse_models(prefix)] == [10000, 12, 1]
        assert str(parse_models(prefix)[1]) == f"{prefix},12"

    @pytest.mark.parametrize("text", ["", "p,", ",1", "1|2", "p,1|", "p,x", "p|q"])
    def test_nonsense(self, text):
        with pytest.raises(ValueError, match="prefix,epoch"):
            parse_models(text)

    def test_no_epoch(self, tmp_path):
        with pytest.raises(ValueError, match="no such file for any epoch"):
            parse_models(str(tmp_path / "model"))

    def test_digest_is_of_the_content(self, symbol_model):
        one, same, other = symbol_model("a"), symbol_model("b"), symbol_model("c")
        for end in ("-0000.params", "-symbol.json"):
            with open(one + end, "rb") as source, open(same + end, "wb") as copy:
                copy.write(source.read())
        digests = [ModelName(prefix, 0).digest() for prefix in (one, same, other)]
        assert digests[0] == digests[1] != digests[2]

    def test_labels_tell_networks_apart(self):
        def labels(*names):
            return labels_of([name for text in names for name in parse_models(text)])

        assert labels("models/r50/model,1", "models/y1/model,1", "a/own,2", "b/net.onnx") == [
            "r50",
            "y1",
            "own",
            "net",
        ]
        assert labels("models/r50/model,1|3", "y1/model,0") == ["r50,1", "r50,3", "y1"]
        assert labels("a/r50/model,1", "b/r50/model,1") == ["a/r50/model,1", "b/r50/model,1"]
        assert labels("model,1") == ["model"]

    def test_what_there_is_is_listed(self, symbol_model, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert str(missing_model()).endswith("as in --model models/r50-dsoftmax-emore/model,1")
        os.makedirs("models/r50")
        for epoch in (1, 4):
            symbol_model("models/r50/model", epoch)
        (tmp_path / "models" / "states-symbol.json").write_text("{}")  # without parameters
        (tmp_path / "models" / "net.onnx").write_bytes(b"")
        assert find_models() == ["models/net.onnx", "models/r50/model,4"]
        assert "in ./models there are models/net.onnx, models/r50/model,4" in str(missing_model())

    @pytest.mark.parametrize(
        ("config", "size"),
        [
            ({"image_size": [96, 80]}, (96, 80)),
            ({"image_size": None, "resolved_image_size": [32, 32]}, (32, 32)),
            ({"image_size": None}, None),
            ({"architectures": ["another program's"]}, None),
            ([], None),
        ],
    )
    def test_size_of_training(self, tmp_path, config, size):
        name = ModelName(str(tmp_path / "model"), 1)
        assert name.trained_size() is None
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert name.trained_size() == size


def sized_model(prefix, side):
    """Save a network that takes square images of one size."""
    embedding = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc1")
    weights = {"fc1_weight": mx.nd.ones((4, 3 * side * side)), "fc1_bias": mx.nd.zeros(4)}
    mx.model.save_checkpoint(str(prefix), 0, embedding, weights, {})
    return f"{prefix},0"


class TestImageSize:
    @pytest.mark.parametrize("side", [32, 56, 112])
    def test_the_error_says_what_to_do(self, tmp_path, rng, side, capfd):
        embed = load_model(sized_model(tmp_path / "model", side))
        assert embed.image_size is None
        assert embed(pictures(rng, 2, side)).shape == (2, 4)
        wanted = f"of 48x48: it seems to want {side}x{side}: --image-size {side},{side}$"
        with pytest.raises(ValueError, match=wanted):
            embed(pictures(rng, 2, 48))
        assert capfd.readouterr().out == ""

    def test_a_network_of_no_usual_size(self, tmp_path, rng):
        embed = load_model(sized_model(tmp_path / "model", 7))
        with pytest.raises(ValueError, match="can't be run on images of 48x48") as error:
            embed(pictures(rng, 2, 48))
        assert "--image-size" not in str(error.value)

    def test_two_networks_at_a_time(self):
        with pytest.raises(ValueError, match="one network at a time"):
            load_model("a/model,1|2")


class TestSymbols:
    @pytest.mark.parametrize("contexts", [[mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]])
    def test_embedding_of_a_classifier(self, symbol_model, rng, contexts):
        prefix = symbol_model(epoch=3, width=7)
        embed = load_model(ModelName(prefix, 3), contexts)
        for count, size in ((5, 32), (1, 32), (4, 21)):
            images = pictures(rng, count, size)
            found = embed(images)
            assert found.shape == (count, 7)
            np.testing.assert_allclose(found, numpy_network(prefix, 3, images), atol=1e-4)

    def test_a_network_without_classifier_under_another_name(self, tmp_path, rng):
        net = mx.gluon.nn.HybridSequential()
        net.add(mx.gluon.nn.GlobalAvgPool2D(), mx.gluon.nn.Flatten(), mx.gluon.nn.Dense(4))
        net.initialize()
        net.hybridize()
        images = pictures(rng, 3)
        expected = net(mx.nd.array(images)).asnumpy()
        net.export(str(tmp_path / "gluon"), 2)
        found = load_model(ModelName(str(tmp_path / "gluon"), 2), [mx.cpu()])(images)
        np.testing.assert_allclose(found, expected, rtol=1e-5)

    def test_what_is_missing_is_named(self, symbol_model, tmp_path, rng):
        prefix = symbol_model(epoch=3)
        with pytest.raises(FileNotFoundError, match=r"model-0009.params.*the epochs 3"):
            load_model(ModelName(prefix, 9), [mx.cpu()])
        with pytest.raises(FileNotFoundError, match=r"none-symbol.json"):
            load_model(ModelName(str(tmp_path / "none"), 0), [mx.cpu()])
        saved = mx.nd.load(f"{prefix}-0003.params")
        del saved["arg:fc1_bias"]
        mx.nd.save(f"{prefix}-0004.params", saved)
        with pytest.raises(ValueError, match=r"0004.params: 1 parameters.*fc1_bias among them"):
            load_model(ModelName(prefix, 4), [mx.cpu()])
        with open(f"{prefix}-0003.params", "rb") as file:
            whole = file.read()
        with open(f"{prefix}-0005.params", "wb") as file:
            file.write(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=r"0005.params: not a parameter file"):
            load_model(ModelName(prefix, 5), [mx.cpu()])
        with pytest.raises(ValueError, match="can't be run on images of 3x3"):
            load_model(ModelName(prefix, 3), [mx.cpu()])(pictures(rng, 2, 3))
        with open(f"{prefix}-symbol.json", "w") as file:
            file.write("{}")
        with pytest.raises(ValueError, match="not a symbol"):
            load_model(ModelName(prefix, 3), [mx.cpu()])

    def test_a_classifier_without_fc1_is_refused(self, tmp_path):
        data = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc7")
        parameters = {"fc7_weight": mx.nd.zeros((3, 12)), "fc7_bias": mx.nd.zeros(3)}
        prefix = str(tmp_path / "model")
        mx.model.save_checkpoint(prefix, 0, mx.sym.SoftmaxOutput(data), parameters, {})
        with pytest.raises(ValueError, match="no output named fc1_output"):
            load_model(ModelName(prefix, 0), [mx.cpu()])


class TestOnnx:
    def write(self, path, scaled_inside, batch="n", output_batch=None):
        onnx = pytest.importorskip("onnx")
        make = onnx.helper
        constants = {"mean": 127.5, "scale": 0.0078125}
        initial = [
            onnx.numpy_helper.from_array(np.array(value, np.float32), name)
            for name, value in constants.items()
        ]
        nodes = [
            make.make_node("Sub", ["x", "mean"], ["a"]),
            make.make_node("Mul", ["a", "scale"], ["b"]),
        ]
        pool = make.make_node("GlobalAveragePool", ["b" if scaled_inside else "x"], ["y"])
        kind = onnx.TensorProto.FLOAT
        graph = make.make_graph(
            [*nodes * scaled_inside, pool],
            "net",
            [make.make_tensor_value_info("x", kind, [batch, 3, 32, 32])],
            [make.make_tensor_value_info("y", kind, [output_batch or batch, 3, 1, 1])],
            initial if scaled_inside else [],
        )
        opset = [make.make_opsetid("", 13)]
        onnx.save(make.make_model(graph, opset_imports=opset, ir_version=8), str(path))
        return load_model(ModelName(str(path)), [mx.cpu()])

    @pytest.mark.parametrize("scaled_inside", [True, False])
    @pytest.mark.parametrize("batch", ["n", 1, 4])
    def test_pixels_and_batches(self, tmp_path, rng, scaled_inside, batch):
        embed = self.write(tmp_path / "net.onnx", scaled_inside, batch)
        images = pictures(rng, 6)
        means = images.mean(axis=(2, 3))
        expected = (means - 127.5) / (128 if scaled_inside else 127.5)
        np.testing.assert_allclose(embed(images), expected, atol=1e-5)

    def test_a_wrong_batch_size_of_the_output_is_no_flood_of_warnings(self, tmp_path, rng, capfd):
        embed = self.write(tmp_path / "net.onnx", True, output_batch=1)
        assert embed(pictures(rng, 6)).shape == (6, 3)
        assert capfd.readouterr().err == ""

    def test_errors(self, tmp_path, rng):
        embed = self.write(tmp_path / "net.onnx", True)
        assert embed.image_size == (32, 32)
        with pytest.raises(ValueError, match=r"images of 16x16: .*--image-size 32,32"):
            embed(pictures(rng, 2, 16))
        (tmp_path / "bad.onnx").write_bytes(b"nothing")
        with pytest.raises(ValueError, match=r"bad.onnx: not an ONNX file"):
            load_model(ModelName(str(tmp_path / "bad.onnx")), [mx.cpu()])
        with pytest.raises(FileNotFoundError, match="no such file"):
            load_model(ModelName(str(tmp_path / "no.onnx")), [mx.cpu()])


@pytest.mark.realdata
def test_the_published_network_of_2018(real_data, rng):
    embed = load_model(ModelName(str(real_data / "y1" / "model"), 0), [mx.cpu()])
    images = pictures(rng, 3, 112)
    found = embed(images)
    assert found.shape == (3, 128)
    np.testing.assert_allclose(embed(images[:1]), found[:1], atol=1e-4)
