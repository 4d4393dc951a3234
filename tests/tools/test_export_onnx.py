"""The command that exports a network to ONNX."""

import json

import pytest

from dsoftmax.tools.export_onnx import main

pytest.importorskip("onnxruntime")


def test_a_checked_file(symbol_model, tmp_path, capsys):
    path = tmp_path / "net.onnx"
    arguments = ["--model", f"{symbol_model()},0", "--output", str(path), "--image-size", "112"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{path}: {path.stat().st_size:,} bytes, opset 13"
    assert lines[1:3] == [
        "input data: float32 (batch, 3, 112, 112), RGB, (pixels - 127.5) / 127.5",
        "output fc1: float32 (batch, 16)",
    ]
    assert lines[3].startswith("checked against MXNet on 8 faces: embeddings differ by ")
    assert len(lines) == 4


def test_other_choices(symbol_model, tmp_path, capsys):
    path = tmp_path / "net.onnx"
    arguments = ["--model", f"{symbol_model()},0", "--output", str(path), "--image-size", "56,48"]
    assert main([*arguments, "--raw-pixels", "--no-check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "input data: float32 (batch, 3, 56, 48), RGB, pixels of 0 to 255"
    assert lines[3] == "not checked against MXNet"
    assert lines[4].startswith("note: insightface's get_model does not take faces of this size")
    assert main([*arguments, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["metadata"]["input_mean"] == "127.5"
    assert results["agreement"]["cosine"] > 0.99999


def test_what_can_not_be_exported(symbol_model, tmp_path, capsys):
    prefix, output = symbol_model(), ["--output", str(tmp_path / "net.onnx")]
    symbol_model(epoch=1)
    for arguments, message in (
        ([], "--model is missing: give prefix,epoch"),
        (["--model", f"{prefix},0|1"], "one network at a time"),
        (["--model", f"{tmp_path}/net.onnx"], "an ONNX file already"),
        (["--model", f"{tmp_path}/none,0"], "there is no such file"),
        (["--model", f"{prefix},0", "--output", f"{tmp_path}/net"], "ends in .onnx"),
        (["--model", f"{prefix},0", "--image-size", "2,2"], "can't be run on images of 2x2"),
    ):
        assert main([*output, *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "net.onnx").exists()
