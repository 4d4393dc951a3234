import json

import numpy as np
import pytest

from dsoftmax.recognition import networks
from dsoftmax.tools import bench_train
from dsoftmax.tools.benchmarks.train_step import CLASSES, ModuleStep, OurStep


def test_the_report(tmp_path, capsys):
    path = tmp_path / "report.json"
    flags = ["--image-size", "32", "--batch-size", "8", "--classes", "20", "--steps", "2"]
    assert bench_train.main([*flags, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert set(report["images_per_second"]) == {"ours", "module"}
    assert all(rate > 0 for rate in report["images_per_second"].values())
    assert "tiny on 32x32, batches of 8: " in capsys.readouterr().out


def test_unknown_networks(capsys):
    assert bench_train.main(["--network", "tinny"]) == 2
    assert "did you mean tiny" in capsys.readouterr().err


@pytest.mark.parametrize("make", [OurStep, ModuleStep])
def test_both_train(make, rng):
    """A step that leaves out a part of the work would be fast."""
    images = rng.integers(0, 256, (8, 3, 32, 32), np.uint8)
    labels = rng.integers(0, 5, 8).astype(np.int32)
    step = make(networks.create("tiny", image_size=(32, 32)), images, labels, 5)
    before = step.weights()
    step()
    after = step.weights()
    trained = {name for name in before if name.endswith("_weight")}
    assert CLASSES in trained
    assert len(trained) > 5
    assert {name for name in trained if (after[name] != before[name]).any()} == trained
