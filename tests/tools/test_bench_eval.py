import json

import mxnet as mx
import pytest

from dsoftmax.tools import bench_eval
from dsoftmax.tools.benchmarks import evaluation


@pytest.fixture
def model(tmp_path):
    """Save a small network with a PReLU."""
    data = mx.sym.LeakyReLU(mx.sym.var("data"), act_type="prelu", name="relu0")
    symbol = mx.sym.FullyConnected(data, num_hidden=4, no_bias=True, name="fc1")
    parameters = {"relu0_gamma": mx.nd.ones(3) / 4, "fc1_weight": mx.nd.ones((4, 3 * 64))}
    mx.model.save_checkpoint(str(tmp_path / "model"), 0, symbol, parameters, {})
    return f"{tmp_path / 'model'},0"


def test_the_report(tmp_path, model, capsys):
    path = tmp_path / "report.json"
    flags = ["--probes", "20", "--distractors", "300", "--pairs", "500", "--templates", "40"]
    flags += ["--gallery", "300", "--queries", "3"]
    flags += ["--width", "16", "--rounds", "2", "--json", str(path)]
    flags += ["--model", model, "--batch-size", "2", "--image-size", "8"]
    assert bench_eval.main(flags) == 0
    report = json.loads(path.read_text())
    for part, ways in (
        ("megaface", {"ours", "numpy", "fully_connected", "loop"}),
        ("ijb", {"ours", "scores", "insightface"}),
        ("network", {"ours", "as_saved"}),
    ):
        assert set(report[part]["seconds"]) == ways
        assert all(len(times) == 2 for times in report[part]["all_seconds"].values())
        assert all(seconds > 0 for seconds in report[part]["seconds"].values())
        assert part == "network" or report[part]["memory_bytes"] >= 0
    assert report["network"]["difference"] < 1e-5
    floors = [report["megaface"]["seconds"][way] for way in evaluation.FLOORS]
    assert report["megaface"]["floor_seconds"] == min(floors)
    forms = report["search"]["forms"]
    for dtype, size in (("float32", 64), ("float16", 32), ("int8", 20)):
        assert forms[dtype]["bytes"] == 300 * size
        assert set(forms[dtype]["seconds"]) == {"traffic", "one", "products", "batch"}
        assert 0.9 <= forms[dtype]["same_top"] <= forms[dtype]["same_first"] <= 1
    assert forms["float32"]["same_top"] == 1
    out = capsys.readouterr().out
    assert "Search, 300 vectors x 16, one query and 3 at once:" in out
    assert "MegaFace, 20 probes x 300 distractors x 16" in out
    assert "x its floor" in out
    assert "the fastest of: numpy " in out
    assert ", FullyConnected " in out
    assert "x as saved" in out


def test_the_floor_is_the_fastest_way():
    times = {"ours": [6.0, 9.0, 8.0], "numpy": [4.0, 4.0, 4.0], "fully_connected": [3.0, 3.0, 4.0]}
    middle = {"ours": 8.0, "numpy": 4.0, "fully_connected": 3.0}
    found = evaluation.floor_of({"seconds": middle, "all_seconds": times})
    assert found == {"floor": "fully_connected", "floor_seconds": 3.0, "ratio": 2.0}


def test_too_much_for_the_machine(monkeypatch, capsys):
    monkeypatch.setattr(bench_eval, "available_bytes", lambda: 10**9)
    assert bench_eval.main([]) == 2
    assert "--distractors: 1000000 vectors" in capsys.readouterr().err
    assert bench_eval.main(["--only", "search"]) == 2
    assert "--gallery: 1000000 vectors of width 512 need 3.1 GB, 1.0" in capsys.readouterr().err
