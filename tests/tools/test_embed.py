"""The command embed, on every kind of input, and as other commands expect its output."""

import csv
import json
import signal
import subprocess
import sys
import time

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.eval import metrics
from dsoftmax.recognition.data.merging import load_embeddings
from dsoftmax.recognition.data.packs import read_pack, write_pack
from dsoftmax.tools import embed, rec2dir, rec_merge


def run(model, source, output, *flags):
    inputs = source if isinstance(source, list) else [str(source)]
    arguments = ["--model", model, "--input", *inputs, "--output", str(output)]
    return embed.main([*arguments, "--image-size", "32", *flags])


def test_a_dataset_and_its_files_give_the_same(dataset, symbol_model, tmp_path, capsys):
    model = f"{symbol_model()},0"
    folder, content = dataset(counts=(2, 3, 1))
    assert run(model, folder, tmp_path / "rec.npy", "--flip") == 0
    out, err = capsys.readouterr()
    assert f"6 embeddings of width 16 in {tmp_path}/rec.npy, their names in" in out
    assert "runs on cpu(0), images of 32x32" in err
    assert rec2dir.main(["--input", str(folder), "--output", str(tmp_path / "files")]) == 0
    assert run(model, tmp_path / "files", tmp_path / "files.npy", "--flip") == 0
    found = np.load(tmp_path / "rec.npy")
    np.testing.assert_allclose(np.load(tmp_path / "files.npy"), found, atol=1e-5)
    with open(tmp_path / "rec.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["label"]) for row in rows] == [
        (str(number), str(label)) for number, (label, _) in enumerate(content, 1)
    ]
    write_pack(str(tmp_path / "own.bin"), [image for _, image in content], [True] * 3)
    assert run(model, tmp_path / "own.bin", tmp_path / "bin.npy", "--flip") == 0
    np.testing.assert_allclose(np.load(tmp_path / "bin.npy"), found, atol=1e-5)


def test_rec_merge_takes_the_output(dataset, symbol_model, tmp_path, capsys):
    model = f"{symbol_model(scale=3.0)},0"
    first, _ = dataset(counts=(1, 1), name="first")
    second, _ = dataset(counts=(1, 2), name="second")
    for folder, images in ((first, 2), (second, 3)):
        assert run(model, folder, tmp_path / f"{folder.name}.npy", "--flip") == 0
        load_embeddings(str(tmp_path / f"{folder.name}.npy"), rows=images)
    joint = ["--include", f"{first},{second}", "--output", str(tmp_path / "joint")]
    files = f"{tmp_path}/first.npy,{tmp_path}/second.npy"
    assert rec_merge.main([*joint, "--embeddings", files, "--overlap", "1"]) == 0
    assert "5 images of 4 identities" in capsys.readouterr().out
    flags = ["--embeddings", files, "--exclude", f"{tmp_path}/first.npy", "--overwrite"]
    assert rec_merge.main([*joint, *flags, "--exclude-overlap", "0.99999", "--overlap", "1"]) == 0
    assert "2 identities were left out" in capsys.readouterr().out  # all of the first set


def test_what_is_told(dataset, symbol_model, tmp_path, jpeg, capsys):
    model = f"{symbol_model()},0"
    for number in range(5):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(*((60, 50) if number else (32, 32))))
    (tmp_path / "9.jpg").write_bytes(b"nothing")
    paths = [str(tmp_path / f"{number}.jpg") for number in (0, 1, 2, 3, 4, 9)]
    assert run(model, paths, tmp_path / "x.npy", "--json") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["images"], report["width"], report["resumed_at"]) == (6, 16, 0)
    assert report["unreadable"][0].startswith(f"{paths[5]}: 7 bytes are no image")
    assert report["fitted"] == [f"{path} (60x50)" for path in paths[1:5]]
    assert "1 images can't be used:\n" in err
    assert "Warning: 4 images were not 32x32 and came without landmarks" in err
    assert "... and 1 more\n" in err
    for flags, message in (
        (["--batch-size", "0"], "--batch-size must be a whole number, 1 or more"),
        (["--model", "models/none,0"], "none-symbol.json: there is no such file"),
        (["--input", str(tmp_path / "none")], "none: there is no such file or folder"),
        ([], "x.npy exists; choose another --output, or --overwrite it"),
    ):
        assert run(model, paths, tmp_path / "x.npy", *flags) == 2
        assert message in capsys.readouterr().err
    assert embed.main(["--input", paths[0], "--output", "y.npy"]) == 2
    assert "--model is missing" in capsys.readouterr().err


def write_onnx(path, prefix):
    """Write the network of `symbol_model` as an ONNX file, node by node."""
    onnx = pytest.importorskip("onnx")
    make, arrays = onnx.helper, mx.nd.load(f"{prefix}-0000.params")
    weights = {name.split(":")[1]: array.asnumpy() for name, array in arrays.items()}
    weights = {name: array for name, array in weights.items() if not name.startswith("fc7")}
    weights.update(mean=np.float32(127.5), scale=np.float32(0.0078125))
    nodes = [
        make.make_node("Sub", ["data", "mean"], ["a"]),
        make.make_node("Mul", ["a", "scale"], ["b"]),
        make.make_node("Conv", ["b", "conv0_weight", "conv0_bias"], ["c"], strides=[4, 4]),
        make.make_node("Tanh", ["c"], ["d"]),
        make.make_node("GlobalAveragePool", ["d"], ["e"]),
        make.make_node("Flatten", ["e"], ["f"]),
        make.make_node("Gemm", ["f", "fc1_weight", "fc1_bias"], ["fc1"], transB=1),
    ]
    kind = onnx.TensorProto.FLOAT
    graph = make.make_graph(
        nodes,
        "net",
        [make.make_tensor_value_info("data", kind, ["n", 3, 32, 32])],
        [make.make_tensor_value_info("fc1", kind, ["n", 16])],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    opset = [make.make_opsetid("", 13)]
    onnx.save(make.make_model(graph, opset_imports=opset, ir_version=8), str(path))
    return str(path)


def test_onnx_and_params_give_the_same(dataset, symbol_model, tmp_path):
    prefix = symbol_model()
    folder, _ = dataset()
    other = write_onnx(tmp_path / "net.onnx", prefix)
    assert run(f"{prefix},0", folder, tmp_path / "params.npy", "--flip") == 0
    assert run(other, folder, tmp_path / "onnx.npy", "--flip") == 0
    found, expected = (np.load(tmp_path / f"{kind}.npy") for kind in ("onnx", "params"))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_ctrl_c(dataset, symbol_model, tmp_path):
    folder, _ = dataset(counts=(2000,))
    output = tmp_path / "x.npy"
    command = [sys.executable, "-m", "dsoftmax.tools.embed", "--model", f"{symbol_model()},0"]
    command += ["--input", str(folder), "--output", str(output), "--batch-size", "1"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        # A job in the background ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 100
    while not (tmp_path / "x.npy.partial").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert "interrupted; the same command goes on where it stopped" in err
    assert not output.exists()
    state = json.loads((tmp_path / "x.npy.partial.json").read_text())
    assert 0 <= state["done"] < 2000


@pytest.mark.realdata
@pytest.mark.slow  # 1200 images; the test of eval/verification.py embeds the same ones
def test_the_published_accuracy(real_data, tmp_path):
    source = real_data / "lfw" / "lfw_600.bin"
    model = f"{real_data / 'y1' / 'model'},0"
    flags = ["--model", model, "--input", str(source), "--output", str(tmp_path / "lfw.npy")]
    assert embed.main([*flags, "--flip", "--normalize"]) == 0
    embeddings = np.load(tmp_path / "lfw.npy")
    distances = np.square(embeddings[0::2].astype(float) - embeddings[1::2]).sum(axis=1)
    accuracy = metrics.fold_accuracy(distances, read_pack(str(source)).issame)
    assert f"{accuracy.mean:.5f}+-{accuracy.deviation:.5f}" == "0.99333+-0.01106"
