"""How a run begins: pretrained networks, and the first class weights."""

import itertools
import os
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.recognition import loop, train
from dsoftmax.recognition.data.records import Records
from dsoftmax.recognition.settings import parse
from tests.recognition.runs import (
    states_of,
)


def train_one(flags):
    made = flags("first", max_steps=6)
    assert train.main(made) == 0
    return parse(made).prefix


@pytest.mark.parametrize("form", ["{},0", "{}"])
def test_pretrained(flags, form, capsys):
    prefix = train_one(flags)
    made = flags("second", pretrained=form.format(prefix), pretrained_epoch=0)
    run = loop.Run(parse(made))
    saved = mx.nd.load(f"{prefix}-0000.params")
    for name, array in run.trained.backbone.parameters().items():
        kind = "aux" if "moving" in name else "arg"
        np.testing.assert_array_equal(array.asnumpy(), saved[f"{kind}:{name}"].asnumpy())
    assert any("parameters of tiny are from" in note for note in run.plan.notes)


class TestWithoutAnEpoch:
    @pytest.fixture
    def begin(self, flags):
        """Return a function that begins a run with a prefix, and returns its notes."""
        numbers = itertools.count()
        return lambda prefix: (
            loop.Run(parse(flags(f"run{next(numbers)}", pretrained=prefix))).plan.notes
        )

    def test_the_only_one(self, flags, begin):
        prefix = train_one(flags)
        os.remove(f"{prefix}-0001.params")
        os.rename(f"{prefix}-0000.params", f"{prefix}-0012.params")
        notes = begin(prefix)
        assert f"--pretrained {prefix}: epoch 12, of 12" in notes
        assert any(note.endswith(f"are from {prefix}-0012.params") for note in notes)

    def test_insightface_s_default_among_several(self, flags, begin):
        prefix = train_one(flags)
        notes = begin(prefix)
        assert f"--pretrained {prefix}: epoch 1, of 0, 1" in notes
        assert any(note.endswith(f"are from {prefix}-0001.params") for note in notes)

    def test_several(self, flags, begin):
        prefix = train_one(flags)
        os.rename(f"{prefix}-0001.params", f"{prefix}-0007.params")
        message = f"--pretrained {prefix}: there are the epochs 0, 7: .* {prefix},7"
        with pytest.raises(ValueError, match=message):
            begin(prefix)
        with pytest.raises(FileNotFoundError, match=r"no .*-0001.params; .* the epochs 0, 7"):
            begin(f"{prefix},1")

    def test_none(self, begin, tmp_path):
        message = r"--pretrained .*no such file for any epoch, such as .*/y1/model-0000.params"
        with pytest.raises(FileNotFoundError, match=message):
            begin(tmp_path / "y1" / "model")


def test_class_weights_that_fit_are_taken(flags, rng):
    prefix = train_one(flags)
    saved = mx.nd.load(f"{prefix}-0000.params")
    for epoch, classes in ((5, 5), (6, 7)):
        weights = mx.nd.array(rng.normal(size=(classes, 8)))
        mx.nd.save(f"{prefix}-{epoch:04d}.params", {**saved, "arg:fc7_weight": weights})
        run = loop.Run(parse(flags(f"run{epoch}", pretrained=f"{prefix},{epoch}")))
        if classes == 5:
            np.testing.assert_array_equal(run.trained.head.class_weights(), weights.asnumpy())
        else:
            assert "its class weights (7, 8) do not fit these 5 classes" in run.plan.notes[-1]


def test_a_network_that_does_not_fit(flags, capsys):
    prefix = train_one(flags)
    saved = mx.nd.load(f"{prefix}-0000.params")
    saved = {f"arg:x{key[4:]}": value for key, value in saved.items()}
    mx.nd.save(f"{prefix}-0009.params", saved)
    assert train.main(flags("other", pretrained=f"{prefix},9")) == 2
    assert "it holds no parameter of tiny" in capsys.readouterr().err
    assert train.main(flags("other", pretrained=f"{prefix},77", resume=True)) == 2
    assert "there is no" in capsys.readouterr().err


def test_a_frozen_backbone(flags):
    prefix = train_one(flags)
    made = flags("frozen", pretrained=f"{prefix},0", freeze_backbone=True)
    assert train.main(made) == 0
    saved = mx.nd.load(f"{prefix}-0000.params")
    for name, array in mx.nd.load(f"{parse(made).prefix}-0000.params").items():
        np.testing.assert_array_equal(array.asnumpy(), saved[name].asnumpy())
    first, last = (np.load(Path(path) / "classes.npy") for path in states_of(made)[::-1])
    assert np.abs(first - last).max() > 1e-3


def test_classes_begin_as_means(flags, faces):
    run = loop.Run(parse(flags(init_classes="mean")))
    records = Records(faces)
    sums = np.zeros((5, 8))
    for image in range(len(records)):
        label, _ = records.read(image)
        pixels = decode_rgb(records, image)
        both = run.trained.backbone.embed(np.stack([pixels, pixels[:, :, ::-1]])).sum(axis=0)
        sums[label] += both / np.linalg.norm(both)
    weights = run.trained.head.class_weights()
    cosines = (sums * weights).sum(axis=1)
    cosines /= np.linalg.norm(sums, axis=1) * np.linalg.norm(weights, axis=1)
    np.testing.assert_allclose(cosines, 1, atol=1e-4)


def decode_rgb(records, image):
    import cv2

    encoded = records.read(image)[1]
    return cv2.imdecode(encoded, cv2.IMREAD_COLOR)[:, :, ::-1].transpose(2, 0, 1)
