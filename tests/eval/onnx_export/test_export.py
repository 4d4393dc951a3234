"""Exported files: whole networks, what the files say, and what their users feed them."""

import json
import subprocess
import sys
import zlib

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.eval.models import ModelName, load_model
from dsoftmax.eval.onnx_export import RAW_PIXELS, SCALED_PIXELS, export, export_model, translate
from dsoftmax.recognition import networks
from dsoftmax.recognition.data.packs import read_pack

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

SMALL = {"multiplier": 0.125, "units_per_stage": (1, 1, 1, 1), "image_size": (32, 32)}
OUTPUTS = ("E", "F", "G", "H", "I", "J", "FC", "GAP", "GNAP", "GDC")
CASES = {
    **{f"r18 {output}": ("r18", {**SMALL, "output": output}) for output in OUTPUTS},
    "r18 GNAP narrow": ("r18", {**SMALL, "output": "GNAP", "embedding_size": 32}),
    "r18 with relu": ("r18", {**SMALL, "act": "relu"}),
    "r18 se unit 1": ("r18", {**SMALL, "se": 1, "unit": 1}),
    "r18 unit 2 input 0": ("r18", {**SMALL, "unit": 2, "input": 0, "image_size": (64, 48)}),
    "r18 input 2": ("r18", {**SMALL, "input": 2}),
    "y1": ("y1", {"image_size": (32, 32)}),
    "tiny": ("tiny", {"image_size": (40, 40)}),
    **{
        f"gluoncv {name}": (f"gluoncv:{name}", {"image_size": (64, 64)})
        for name in (
            "resnet18_v1",
            "resnet18_v2",
            "mobilenetv2_0.25",
            "mobilenetv3_small",
            "shufflenet_v1",
            "shufflenet_v2",
            "squeezenet1.1",
            "se_resnet18_v1",
        )
    },
}
LARGE = ("resnest14", "xception", "darknet53", "resnet50_v1d", "vgg11_bn")


@pytest.fixture
def saved(tmp_path, rng):
    """Return a function that saves a network with random parameters; it returns its name."""

    def save(name, **options):
        network = networks.create(name, **options)
        network.initialize(networks.initializer(name))
        network(mx.nd.zeros((1, 3, *options["image_size"])))
        for key, parameter in network.collect_params().items():
            if key.endswith(("gamma", "mean", "var", "beta", "bias")):
                parameter.set_data(mx.nd.array(rng.uniform(0.5, 1, parameter.shape)))
        networks.save_model(network, str(tmp_path / "model"), 1)
        config = {"network": name, "loss": "dsoftmax", "image_size": options["image_size"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return ModelName(str(tmp_path / "model"), 1)

    return save


def draw_images(rng, count, size):
    return rng.integers(0, 256, (count, 3, *size), np.uint8)


def as_insightface(path, images):
    """Embed as insightface's ArcFaceONNX does: names of the first nodes decide on the scaling."""
    names = [node.name for node in onnx.load(str(path)).graph.node[:8]]
    is_scaled_inside = all(
        any(name.startswith(beginnings) for name in names)
        for beginnings in (("Sub", "_minus"), ("Mul", "_mul"))
    )
    mean, std = (0.0, 1.0) if is_scaled_inside else (127.5, 127.5)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (output,) = session.get_outputs()
    blob = ((images.astype(np.float32) - mean) / std).astype(np.float32)
    return session.run([output.name], {session.get_inputs()[0].name: blob})[0]


@pytest.mark.parametrize(
    ("case", "pixels"),
    [
        *((case, SCALED_PIXELS) for case in CASES),
        *((case, RAW_PIXELS) for case in ("y1", "r18 E", "r18 input 2")),
    ],
)
def test_networks(case, pixels, saved, tmp_path, rng, capfd):
    network, options = CASES[case]
    name, path = saved(network, **options), str(tmp_path / "net.onnx")
    exported = export_model(name, path, pixels=pixels)
    assert exported.agreement.difference < 1e-4
    assert exported.agreement.cosine > 0.99999
    images = draw_images(rng, 3, options["image_size"])
    expected = load_model(name, [mx.cpu()], rewrite=False)(images)
    for found in (as_insightface(path, images), load_model(path, [mx.cpu()])(images)):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    assert "onnxruntime" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_large_networks_of_gluoncv(name, saved, tmp_path):
    export_model(saved(f"gluoncv:{name}", image_size=(112, 112)), str(tmp_path / "net.onnx"))


def test_files_of_older_versions(saved, tmp_path, rng):
    """They have casts and an identity around the network, and Gluon's names."""
    name, path = saved("tiny", image_size=(32, 32)), str(tmp_path / "net.onnx")
    images = draw_images(rng, 2, (32, 32))
    expected = load_model(name, [mx.cpu()])(images)
    old = mx.sym.identity(
        networks.create("tiny", image_size=(32, 32))(mx.sym.var("data")), name="fc1"
    )
    assert "fc1_fwd_output" in old.get_internals().list_outputs()
    old.save(name.files()[0])
    assert (load_model(name, [mx.cpu()])(images) == expected).all()
    assert export_model(name, path).agreement.difference < 1e-4
    assert {node.op_type for node in onnx.load(path).graph.node}.isdisjoint({"Cast", "Sub", "Mul"})


class TestFile:
    def test_what_it_says_about_itself(self, saved, tmp_path):
        name, path = saved("tiny", image_size=(48, 48)), tmp_path / "net.onnx"
        exported = export_model(name, str(path))
        model = onnx.load(str(path))
        onnx.checker.check_model(model, full_check=True)
        assert [(one.domain, one.version) for one in model.opset_import] == [("", 13)]
        assert model.ir_version == 7
        (given,), (embedding,) = model.graph.input, model.graph.output
        assert (given.name, embedding.name) == ("data", "fc1")
        kind = given.type.tensor_type
        assert kind.elem_type == onnx.TensorProto.FLOAT
        assert [one.dim_param or one.dim_value for one in kind.shape.dim] == ["batch", 3, 48, 48]
        shape = embedding.type.tensor_type.shape.dim
        assert [one.dim_param or one.dim_value for one in shape] == ["batch", 128]
        metadata = {one.key: one.value for one in model.metadata_props}
        assert metadata == exported.metadata
        assert metadata == {
            "name": tmp_path.name,
            "network": "tiny",
            "loss": "dsoftmax",
            "embedding_size": "128",
            "image_size": "48,48",
            "input": "float32 (batch, 3, 48, 48), RGB, (pixels - 127.5) / 127.5",
            "input_mean": "127.5",
            "input_std": "127.5",
        }
        assert not {node.op_type for node in model.graph.node} & {"Sub", "Mul", "Identity"}
        assert exported.bytes == path.stat().st_size

    def test_the_factor_is_in_the_first_convolution(self, saved, tmp_path):
        name, path = saved("tiny", image_size=(32, 32)), str(tmp_path / "net.onnx")
        export_model(name, path)
        arrays = {
            one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer
        }
        given = {key[4:]: value.asnumpy() for key, value in mx.nd.load(name.files()[1]).items()}
        np.testing.assert_allclose(
            arrays["stage1_conv_weight"], given["stage1_conv_weight"] * 127.5 / 128, rtol=1e-6
        )
        assert (arrays["stage2_conv_weight"] == given["stage2_conv_weight"]).all()

    def test_a_weight_used_twice_is_not_scaled(self, rng):
        data, weight = mx.sym.var("data"), mx.sym.var("weight")
        options = {"kernel": (3, 3), "num_filter": 3, "pad": (1, 1), "no_bias": True}
        first = mx.sym.Convolution((data - 127.5) * 0.0078125, weight, **options)
        symbol = mx.sym.Convolution(first, weight, **options)
        weights = {"weight": mx.nd.array(rng.normal(0, 1, (3, 3, 3, 3)))}
        model = translate(symbol, weights, (8, 8))
        assert [node.op_type for node in model.graph.node][:3] == ["Mul", "Add", "Conv"]

    def test_classifiers_are_left_out(self, symbol_model, tmp_path):
        name = ModelName(symbol_model(), 0)
        export_model(name, str(tmp_path / "net.onnx"), image_size=(32, 32))
        initializers = onnx.load(str(tmp_path / "net.onnx")).graph.initializer
        assert not [one.name for one in initializers if one.name.startswith("fc7")]

    def test_without_metadata_the_nodes_decide(self, saved, tmp_path, rng):
        name, path = saved("tiny", image_size=(32, 32)), str(tmp_path / "net.onnx")
        images = draw_images(rng, 2, (32, 32))
        expected = load_model(name, [mx.cpu()])(images)
        for pixels in (SCALED_PIXELS, RAW_PIXELS):
            export_model(name, path, pixels=pixels)
            model = onnx.load(path)
            del model.metadata_props[:]
            onnx.save(model, path)
            found = load_model(path, [mx.cpu()])(images)
            np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


class TestRefusals:
    def test_a_wrong_translation_is_never_written(self, saved, tmp_path, monkeypatch):
        name = saved("tiny", image_size=(32, 32))

        def translate_wrongly(*args):
            model = translate(*args)
            weight = model.graph.initializer[0]
            wrong = onnx.numpy_helper.to_array(weight) * np.float32(1.1)
            weight.CopyFrom(onnx.numpy_helper.from_array(wrong, weight.name))
            return model

        monkeypatch.setattr(export, "translate", translate_wrongly)
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ValueError, match=r"net.onnx is not written: .* differ from MXNet's"):
            export_model(name, str(tmp_path / "net.onnx"))
        assert sorted(tmp_path.iterdir()) == before
        export_model(name, str(tmp_path / "net.onnx"), is_checked=False)
        assert (tmp_path / "net.onnx").exists()

    def test_sizes(self, saved, tmp_path):
        name = saved("tiny", image_size=(32, 32))
        with pytest.raises(ValueError, match=r"images of 64x64: it seems to want 32x32"):
            export_model(name, str(tmp_path / "net.onnx"), image_size=(64, 64))

    def test_unknown_operators(self, tmp_path):
        symbol = mx.sym.sin(mx.sym.Flatten(mx.sym.var("data")), name="fc1")
        prefix = str(tmp_path / "model")
        mx.model.save_checkpoint(prefix, 0, symbol, {"a": mx.nd.zeros(1)}, {})
        with pytest.raises(ValueError, match=r"model,0: node fc1: operator sin can't"):
            export_model(ModelName(prefix, 0), str(tmp_path / "net.onnx"))

    def test_embeddings_that_overflow(self, saved, tmp_path):
        name = saved("tiny", image_size=(32, 32))
        arrays = mx.nd.load(name.files()[1])
        arrays["arg:pre_fc1_weight"][:] = 3e38
        mx.nd.save(name.files()[1], arrays)
        with pytest.raises(ValueError, match="not finite"):
            export_model(name, str(tmp_path / "net.onnx"))

    @pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
    def test_without_the_extra(self, missing, saved, tmp_path, monkeypatch):
        name = saved("tiny", image_size=(32, 32))
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(ImportError, match=r"pip install 'dsoftmax\[onnx\]'"):
            export_model(name, str(tmp_path / "net.onnx"))
        if missing == "onnxruntime":
            assert export_model(name, str(tmp_path / "net.onnx"), is_checked=False).bytes


def fixed_parameters(symbol):
    """Draw the parameters for which outputs.npz says what insightface's graphs compute."""
    arguments, _, auxiliary = symbol.infer_shape(data=(1, 3, 112, 112))
    names = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
    shapes = dict(zip(names, [*arguments, *auxiliary]))
    del shapes["data"]

    def draw(name, shape):
        rng = np.random.RandomState(zlib.crc32(name.encode()))
        if name.endswith("gamma"):
            return rng.uniform(0.5, 1, shape)
        if name.endswith("var"):
            return rng.uniform(1, 2, shape)
        if name.endswith(("beta", "mean", "bias")):
            return rng.normal(0, 0.1, shape)
        return rng.normal(0, np.sqrt(1 / np.prod(shape[1:])) if len(shape) > 1 else 1, shape)

    return {name: mx.nd.array(draw(name, shape)) for name, shape in shapes.items()}


@pytest.mark.realdata
@pytest.mark.parametrize(
    "name",
    [
        "m1",
        "m05",
        "mnas",
        "mnas05",
        "mnas025",
        "vargfacenet",
        "r18-SFC",
        pytest.param("d169", marks=pytest.mark.slow),
        pytest.param("d201", marks=pytest.mark.slow),
    ],
)
def test_graphs_of_insightface(name, real_data, tmp_path):
    symbol = mx.sym.load(str(real_data / "networks" / f"{name}-symbol.json"))
    expected = np.load(real_data / "networks" / "outputs.npz")[name]
    images = np.random.RandomState(0).randint(0, 256, (2, 3, 112, 112))
    onnx.save(translate(symbol, fixed_parameters(symbol), (112, 112)), str(tmp_path / "net.onnx"))
    found = as_insightface(tmp_path / "net.onnx", images)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.fixture
def exported_y1(real_data, tmp_path):
    """Export the published y1 in both ways; return its name and both paths."""
    name = ModelName(str(real_data / "y1" / "model"), 0)
    paths = [str(tmp_path / file) for file in ("scaled.onnx", "raw.onnx")]
    for path, pixels in zip(paths, (SCALED_PIXELS, RAW_PIXELS)):
        export_model(name, path, pixels=pixels)
    return name, paths


@pytest.mark.slow
@pytest.mark.realdata
def test_the_published_y1_verifies_as_before(exported_y1, real_data):
    from dsoftmax.eval.verification import evaluate

    _, paths = exported_y1
    pack = read_pack(str(real_data / "lfw" / "lfw_600.bin"))
    for path in paths:
        (result,) = evaluate(load_model(path, [mx.cpu()]), [pack], batch_size=50)
        assert f"{result.accuracy.mean:1.5f}+-{result.accuracy.deviation:1.5f}" == (
            "0.99333+-0.01106"
        )
        assert result.xnorm == pytest.approx(11.149233, abs=1e-4)


RUN_INSIGHTFACE = """
import sys
import numpy as np
from insightface.model_zoo import get_model
faces, *paths = sys.argv[1:]
for path in paths:
    model = get_model(path, providers=["CPUExecutionProvider"])
    assert type(model).__name__ == "ArcFaceONNX"
    pictures = [np.ascontiguousarray(face[:, :, ::-1]) for face in np.load(faces)]  # BGR
    np.save(path + ".npy", model.get_feat(pictures))
"""


@pytest.mark.slow
@pytest.mark.realdata
def test_the_insightface_package_gets_the_same_embeddings(exported_y1, real_data, tmp_path):
    cv2 = pytest.importorskip("cv2")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    packages = ["insightface", "onnx<1.17", "onnxruntime<1.20", "numpy<2"]
    installed = subprocess.run(
        [python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True
    )
    if installed.returncode:
        pytest.skip(f"insightface can't be installed here: {installed.stderr[-200:]}")
    name, paths = exported_y1
    pack = read_pack(str(real_data / "lfw" / "lfw_600.bin"))
    faces = [cv2.imdecode(np.frombuffer(one, np.uint8), 1)[:, :, ::-1] for one in pack.images[:8]]
    np.save(tmp_path / "faces.npy", faces)
    subprocess.run([python, "-c", RUN_INSIGHTFACE, tmp_path / "faces.npy", *paths], check=True)
    expected = load_model(name, [mx.cpu()])(np.stack(faces).transpose(0, 3, 1, 2))
    for path in paths:
        found = np.load(f"{path}.npy")
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
