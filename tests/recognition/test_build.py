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


def test_shards_of_class_weights_are_taken(flags, rng):
    prefix = train_one(flags)
    saved = mx.nd.load(f"{prefix}-0000.params")
    weights = rng.normal(size=(6, 8))  # five classes on two devices, and one that fills them up
    for device in range(2):
        saved[f"arg:fc7_{device}_weight"] = mx.nd.array(weights[3 * device : 3 * device + 3])
    mx.nd.save(f"{prefix}-0005.params", saved)
    run = loop.Run(parse(flags("run", pretrained=f"{prefix},5")))
    taken = run.trained.head.class_weights()
    np.testing.assert_array_equal(taken, weights[:5].astype(np.float32))


class TestClassWeights:
    """``--class-weights``: another loss begins with the classes of a run, wherever they live."""

    @pytest.mark.parametrize(
        "changes",
        [
            {"loss": "arcface"},
            {"loss": "arcface", "devices": "cpu:2", "per_batch_size": 4, "class_parallel": 1},
            {"loss": "dsoftmax_k", "sample_rate": 0.4, "store": "host"},
        ],
    )
    @pytest.mark.parametrize("form", ["run", "npy"])
    def test_of_a_run(self, flags, tmp_path, form, changes):
        prefix = train_one(flags)
        weights = np.load(Path(states_of(flags("first", max_steps=6))[0]) / "classes.npy")
        np.save(tmp_path / "weights.npy", weights)
        given = {"run": os.path.dirname(prefix), "npy": tmp_path / "weights.npy"}[form]
        run = loop.Run(parse(flags("second", class_weights=given, **changes)))
        np.testing.assert_array_equal(run.trained.head.class_weights(), weights)
        assert f"class weights are from {given}" in run.plan.notes

    def test_they_outrank_those_of_a_model(self, flags, tmp_path, rng):
        prefix = train_one(flags)
        saved = mx.nd.load(f"{prefix}-0000.params")
        model = {**saved, "arg:fc7_weight": mx.nd.array(rng.normal(size=(5, 8)))}
        mx.nd.save(f"{prefix}-0005.params", model)
        weights = rng.normal(size=(5, 8)).astype(np.float32)
        np.save(tmp_path / "w.npy", weights)
        both = {"pretrained": f"{prefix},5", "class_weights": tmp_path / "w.npy"}
        run = loop.Run(parse(flags("second", **both)))
        np.testing.assert_array_equal(run.trained.head.class_weights(), weights)

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ((7, 8), "--class-weights: .*w.npy: it holds 7 classes, and 5 are needed: tools/cl"),
            ((5, 9), "class weights of width 9, and the embeddings have width 8"),
        ],
    )
    def test_those_that_do_not_fit(self, flags, tmp_path, shape, message):
        np.save(tmp_path / "w.npy", np.ones(shape))
        with pytest.raises(ValueError, match=message):
            loop.Run(parse(flags(class_weights=tmp_path / "w.npy")))

    @pytest.mark.parametrize("bad", [np.nan, -np.inf])
    def test_one_that_is_no_number(self, flags, tmp_path, bad):
        weights = np.ones((5, 8))
        weights[3, 2] = bad
        np.save(tmp_path / "w.npy", weights)
        with pytest.raises(ValueError, match=r"--class-weights: .*w.npy: class weight 3 holds NaN"):
            loop.Run(parse(flags(class_weights=tmp_path / "w.npy")))

    def test_two_beginnings(self, flags):
        with pytest.raises(ValueError, match="both say how class weights begin"):
            loop.Run(parse(flags(class_weights="w.npy", init_classes="mean")))


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
