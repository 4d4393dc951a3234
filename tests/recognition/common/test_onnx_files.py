"""ONNX files that name other files."""

import mxnet as mx
import numpy as np
import onnx
import pytest
from onnx import helper

from dsoftmax.eval.models import ModelName, load_model
from dsoftmax.recognition.data.detection import DetectorError, open_detector
from tests.detectors import marker_scrfd


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a network with a number in another file."""
    (tmp_path / "models").mkdir()
    np.array([7], np.float32).tofile(tmp_path / "secret")
    np.array([7], np.float32).tofile(tmp_path / "models" / "beside")
    (tmp_path / "models" / "link").symlink_to(tmp_path / "secret")

    def make(location, is_nested=False):
        number = onnx.TensorProto(name="number", data_type=onnx.TensorProto.FLOAT, dims=[1])
        number.data_location = onnx.TensorProto.EXTERNAL
        number.external_data.add(key="location", value=str(location))
        nodes = [
            helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
            helper.make_node("Add", ["pooled", "number"], ["y"]),
        ]
        if is_nested:
            nodes.insert(0, helper.make_node("Constant", [], ["number"], value=number))
        kind = onnx.TensorProto.FLOAT
        graph = helper.make_graph(
            nodes,
            "net",
            [helper.make_tensor_value_info("x", kind, [1, 3, 32, 32])],
            [helper.make_tensor_value_info("y", kind, [1, 3, 1, 1])],
            [] if is_nested else [number],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        path = tmp_path / "models" / "net.onnx"
        path.write_bytes(model.SerializeToString())
        return str(path)

    return make


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "link", "absent", "", ".."])
def test_other_files_are_refused_by_name(write, location, is_nested):
    path = write(location, is_nested)
    with pytest.raises(ValueError, match=r"net\.onnx: .*only files beside it") as error:
        load_model(ModelName(path), [mx.cpu()])
    assert repr(location) in str(error.value)


def test_files_beside_it_are_read(write):
    embed = load_model(ModelName(write("beside")), [mx.cpu()])
    np.testing.assert_allclose(embed(np.full((1, 3, 32, 32), 127.5)), [[7, 7, 7]])


def test_a_detector_that_names_a_file(tmp_path):
    path = marker_scrfd(tmp_path / "det.onnx")
    model = onnx.load(path)
    number = model.graph.initializer[0]
    number.ClearField("raw_data")
    number.data_location = onnx.TensorProto.EXTERNAL
    number.external_data.add(key="location", value="../secret")
    (tmp_path / "det.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(DetectorError, match=r"det\.onnx: .*'\.\./secret'"):
        open_detector(path)
