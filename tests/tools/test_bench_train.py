import json

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.recognition import networks
from dsoftmax.tools import bench_train


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


@pytest.mark.parametrize("make", [bench_train.our_step, bench_train.module_step])
def test_both_train(make, rng, monkeypatch):
    """A step that does nothing would be fast."""
    seen = []
    update = mx.optimizer.SGD._update_impl
    monkeypatch.setattr(
        mx.optimizer.SGD,
        "_update_impl",
        lambda *args, **options: (seen.append(args[1]), update(*args, **options)),
    )
    images = rng.integers(0, 256, (8, 3, 32, 32), np.uint8)
    labels = rng.integers(0, 5, 8).astype(np.int32)
    step = make(networks.create("tiny", image_size=(32, 32)), images, labels, 5)
    step()
    step()
    assert len(seen) >= 2
