"""The command that cuts a checkpoint down to its embedding."""

import json
import os

import mxnet as mx
import numpy as np

from dsoftmax.eval.models import load_model
from dsoftmax.tools.model_slim import main


def test_the_classifier_is_dropped(symbol_model, capsys, rng):
    prefix = symbol_model(epoch=12)
    assert main(["--model", f"{prefix},12"]) == 0
    before, after = (
        os.path.getsize(path) for path in (f"{prefix}-0012.params", f"{prefix}s-0000.params")
    )
    assert capsys.readouterr().out.splitlines() == [
        f"{prefix}s-0000.params: {after:,} bytes, before {before:,}",
        "dropped fc7_bias, fc7_weight",
        f"the same embeddings: --model {prefix}s,0",
    ]
    # As insightface's own tools load it.
    symbol, arguments, auxiliary = mx.model.load_checkpoint(f"{prefix}s", 0)
    assert symbol.list_outputs() == ["fc1_output"]
    assert sorted(arguments) == ["conv0_bias", "conv0_weight", "fc1_bias", "fc1_weight"]
    assert not auxiliary
    images = rng.integers(0, 256, (3, 3, 32, 32), np.uint8)
    found, expected = (
        load_model(name, [mx.cpu()])(images) for name in (f"{prefix}s,0", f"{prefix},12")
    )
    assert (found == expected).all()


def test_statistics_stay_auxiliary(tmp_path, capsys):
    embedding = mx.sym.BatchNorm(mx.sym.Flatten(mx.sym.var("data")), name="fc1")
    classes = mx.sym.FullyConnected(embedding, num_hidden=5, name="fc7")
    ones = mx.nd.ones(48)
    arguments = {"fc1_gamma": ones, "fc1_beta": ones, "fc7_weight": mx.nd.ones((5, 48))}
    arguments["fc7_bias"] = mx.nd.ones(5)
    auxiliary = {"fc1_moving_mean": ones, "fc1_moving_var": ones}
    prefix, slim = str(tmp_path / "model"), str(tmp_path / "out" / "slim")
    mx.model.save_checkpoint(prefix, 3, mx.sym.SoftmaxOutput(classes), arguments, auxiliary)
    assert main(["--model", f"{prefix},3", "--output", slim, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["model"] == f"{slim},0"
    assert results["dropped"] == ["fc7_bias", "fc7_weight"]
    _, arguments, auxiliary = mx.model.load_checkpoint(slim, 0)
    assert sorted(arguments) == ["fc1_beta", "fc1_gamma"]
    assert sorted(auxiliary) == ["fc1_moving_mean", "fc1_moving_var"]


def test_what_can_not_be_slimmed(symbol_model, tmp_path, capsys):
    prefix = symbol_model()
    other = str(tmp_path / "other")
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="embedding")
    weights = {"embedding_weight": mx.nd.ones((3, 12)), "embedding_bias": mx.nd.ones(3)}
    mx.model.save_checkpoint(other, 0, symbol, weights, {})
    before = sorted(os.listdir(tmp_path))
    for arguments, message in (
        ([], "--model is missing"),
        (["--model", f"{other},0"], "other-symbol.json: it has no output named fc1_output"),
        (["--model", f"{tmp_path}/net.onnx"], "an ONNX file has no classifier"),
        (["--model", f"{prefix},0", "--output", prefix], "would replace"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == before
