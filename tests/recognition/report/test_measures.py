"""What a report computes anew agrees with naive loops, and with what the run itself did."""

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.eval.models import ModelName, load_model
from dsoftmax.recognition import loop
from dsoftmax.recognition.data.images import load_rgb
from dsoftmax.recognition.data.records import Records
from dsoftmax.recognition.report import measures
from dsoftmax.recognition.report.run_folder import RunFolder
from dsoftmax.recognition.report.sources import reopen
from dsoftmax.recognition.settings import parse
from tests.recognition.runs import folder_of


def naive_pairs(weights, most):
    unit = weights / np.linalg.norm(weights, axis=1, keepdims=True)
    pairs = [
        (float(unit[one] @ unit[other]), one, other)
        for one in range(len(unit))
        for other in range(one + 1, len(unit))
    ]
    return sorted(pairs, reverse=True)[:most]


@pytest.mark.parametrize("rows_at_once", [7, 64, 1000])
def test_closest_pairs(rng, monkeypatch, rows_at_once):
    monkeypatch.setattr(measures, "ROWS_AT_ONCE", rows_at_once)
    weights = rng.normal(size=(90, 5)).astype(np.float32)
    weights[33] = 3 * weights[7]  # one person under two labels
    found = measures.closest_pairs(weights, 8)
    assert (found.is_exact, found.compared, found.among) == (True, 90, 90)
    expected = naive_pairs(weights, 8)
    assert [pair[1:] for pair in found.pairs] == [pair[1:] for pair in expected]
    assert [pair.cosine for pair in found.pairs] == pytest.approx(
        [pair[0] for pair in expected], abs=1e-6
    )


def test_closest_pairs_of_some_classes(rng, monkeypatch):
    """What is found of a part is true, and the best that the part has."""
    monkeypatch.setattr(measures, "ROWS_AT_ONCE", 16)
    monkeypatch.setattr(measures, "MOST_PRODUCTS", 30 * 200 * 4)
    weights = rng.normal(size=(200, 4)).astype(np.float32)
    found = measures.closest_pairs(weights, 5, seed=3)
    assert (found.is_exact, found.compared, found.among) == (False, 30, 200)
    unit = weights / np.linalg.norm(weights, axis=1, keepdims=True)
    for cosine, one, other in found.pairs:
        assert cosine == pytest.approx(unit[one] @ unit[other], abs=1e-6)
    assert len({pair[1:] for pair in found.pairs}) == 5
    monkeypatch.setattr(measures, "MOST_BYTES", 4 * 4 * 16 * 3)  # three blocks of rows
    found = measures.closest_pairs(weights, 5)
    assert found.among in (3 * 16, 2 * 16 + 200 % 16)


def test_classes_without_weights(rng):
    weights = np.zeros((3, 4), np.float32)
    weights[0, 0] = 1
    assert measures.closest_pairs(weights, 9).pairs[0].cosine == 0


@pytest.mark.parametrize("loss", ["dsoftmax_k", "rand_arcface"])
def test_ages_of_rows_are_those_of_the_run(flags, loss):
    made = flags(loss=loss, sample_rate=0.3, max_steps=12, num_classes=40, target="none")
    run = loop.Run(parse(made))
    last_used = np.full(40, -1)
    draw = run.trained.head.sampler.draw

    def watched(step, labels, embeddings=None):
        drawn = draw(step, labels, embeddings)
        last_used[drawn.classes] = last_used[labels] = step
        return drawn

    run.trained.head.sampler.draw = watched
    assert run.train() == 0
    folder = RunFolder(str(folder_of(made)))
    found = measures.row_ages(folder, reopen(folder))
    assert found.is_whole_run == (found.steps == 12)
    expected = np.where(last_used < 0, -1, 11 - last_used)
    np.testing.assert_array_equal(found.ages, expected)


def test_a_forest_can_t_be_drawn_again(flags):
    made = flags(loss="hf_softmax", sample_rate=0.8, max_steps=2, target="none")
    assert loop.Run(parse(made)).train() == 0
    folder = RunFolder(str(folder_of(made)))
    with pytest.raises(ValueError, match="depend on its embeddings"):
        measures.row_ages(folder, reopen(folder))


def test_positives_are_those_of_the_saved_model(flags):
    made = flags(max_steps=4, target="none")
    assert loop.Run(parse(made)).train() == 0
    folder = RunFolder(str(folder_of(made)))
    found = measures.sample_positives(folder, reopen(folder))
    records = Records(parse(made).data_dir)
    embed = load_model(ModelName(parse(made).prefix, 0), [mx.cpu()])
    weights = np.load(f"{folder.state}/classes.npy")
    expected = []
    for image in range(len(records)):
        label, encoded = records.read(image)
        (embedding,) = embed(load_rgb(encoded).transpose(2, 0, 1)[None])
        lengths = np.linalg.norm(embedding) * np.linalg.norm(weights[label])
        expected.append((label, embedding @ weights[label] / lengths))
    assert len(found.z_y) == len(records)
    np.testing.assert_allclose(
        sorted(zip(found.classes, found.z_y)), sorted(expected), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_array_equal(found.images_per_class, np.bincount(records.labels))
