"""Cosines, verdicts, and false accept rates against a count of pairs."""

import json
import math

import numpy as np
import pytest

from dsoftmax.eval import metrics, plots
from dsoftmax.eval.comparison import (
    Calibration,
    Threshold,
    compare,
    draw_comparison,
    matrix_lines,
    rate_line,
    read_calibration,
)
from dsoftmax.eval.models import ModelName
from dsoftmax.recognition.common.cli import print_json
from dsoftmax.recognition.common.vectors import normalized


@pytest.fixture
def scores(rng):
    return rng.normal(0.6, 0.1, 3000), rng.normal(0, 0.12, 5000)


@pytest.fixture
def model(symbol_model):
    return ModelName(symbol_model(), 0)


@pytest.fixture
def results(tmp_path, model, scores):
    """Write what verification writes."""

    def write(fars=(1e-2, 1e-3, 1e-5), of=model, **changes):
        points = metrics.at_far(*scores, fars)
        entry = {
            "target": "lfw",
            "model": str(of),
            "digest": of.digest(),
            "pairs": 8000,
            "same": 3000,
            "cosine_threshold": 0.31,
            "highest_impostor": scores[1].max(),
            "calibration": [{"far": f, "cosine": p.threshold} for f, p in zip(fars, points)],
            "roc": plots.sample_roc(*scores)._asdict(),
            **changes,
        }
        print_json({"results": [entry]}, str(tmp_path / "results.json"))
        return str(tmp_path / "results.json")

    return write


def test_false_accept_rates_against_a_count(results, model, scores, rng):
    calibration = read_calibration(results(), model)
    assert (calibration.target, calibration.pairs) == ("lfw", 5000)
    impostor = np.sort(scores[1])
    for cosine in [*rng.uniform(-0.3, impostor[-6], 200), *impostor[[0, 100, 4000, -10]]]:
        true = np.count_nonzero(impostor >= cosine) / len(impostor)
        assert true <= calibration.false_accept_rate(cosine) + 1e-12
        assert calibration.false_accept_rate(cosine) <= max(1.06 * true, true + 6 / len(impostor))
    assert calibration.false_accept_rate(-1) == 1
    assert calibration.false_accept_rate(impostor[-1]) == pytest.approx(5 / 5000)
    assert calibration.false_accept_rate(impostor[-1] + 1e-6) == 0  # though 1e-5 was asked for


@pytest.mark.parametrize(
    ("rate", "share"), [(0.0, "none"), (0.01234, "at most 1.23 %"), (1.0, "all")]
)
def test_words_for_a_rate(rate, share):
    calibration = Calibration("lfw", 100, [(-1.0, rate)], [], 0.3)
    (pair,) = compare(np.eye(2), calibration=calibration)
    expected = f"{share} of the 100 pairs of different people in lfw are as alike"
    assert rate_line(pair, calibration) == expected


def test_thresholds(results, model, scores):
    calibration = read_calibration(results(), model)
    (point,) = metrics.at_far(*scores, [1e-3])
    assert calibration.threshold() == (point.threshold, 1e-3)  # 5000 pairs can't show 1e-5
    assert calibration.threshold(1e-2).far == 1e-2
    assert "false accept rate 0.01" in str(calibration.threshold(1e-2))
    with pytest.raises(ValueError, match=r"--far 0.1: .*thresholds for 1e-05, 0.001, 0.01; run"):
        calibration.threshold(0.1)
    without = read_calibration(results(fars=()), model)
    assert without.threshold() == (0.31, None)


def test_files_of_others_are_refused(results, model, tmp_path, symbol_model):
    other = ModelName(symbol_model("other"), 0)
    with pytest.raises(ValueError, match=r"a calibration of .*other,0, not of .*model,0"):
        read_calibration(results(of=other), model)
    moved = model._replace(prefix=symbol_model("moved"))
    for old, new in zip(model.files(), moved.files()):
        with open(old, "rb") as source, open(new, "wb") as target:
            target.write(source.read())
    assert read_calibration(results(), moved).pairs == 5000  # the same model elsewhere
    for content in ("no json", "[]", json.dumps({"results": [{"digest": model.digest()}]})):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ValueError, match=r"not a file that eval/verification.py wrote"):
            read_calibration(str(tmp_path / "bad.json"), model)


@pytest.mark.parametrize(
    "changes",
    [{"cosine_threshold": "x"}, {"cosine_threshold": 7}, {"pairs": None}, {"calibration": "ab"}],
)
def test_numbers_that_can_not_be_are_refused(results, model, changes):
    with pytest.raises(ValueError, match=r"results\.json: not a file that eval/verification\.py"):
        read_calibration(results(**changes), model)


def test_of_several_results_that_with_most_pairs(results, model, tmp_path):
    with open(results()) as file:
        (one,) = json.load(file)["results"]
    few = {**one, "target": "few", "pairs": 3010}
    (tmp_path / "both.json").write_text(json.dumps({"results": [few, one]}))
    assert read_calibration(str(tmp_path / "both.json"), model).target == "lfw"


def test_all_pairs(rng):
    vectors = normalized(rng.normal(size=(4, 8)).astype(np.float32))
    pairs = compare(vectors, Threshold(0.1))
    assert [(pair.first, pair.second) for pair in pairs] == [
        (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)
    ]  # fmt: skip
    for pair in pairs:
        cosine = math.fsum(float(a) * float(b) for a, b in zip(vectors[pair[0]], vectors[pair[1]]))
        assert pair.cosine == pytest.approx(cosine, abs=1e-6)
        assert pair.is_same == (cosine > 0.1)
        assert pair.verdict == ("one person" if cosine > 0.1 else "two people")
    assert compare(vectors)[0].verdict == ""
    head, *lines = matrix_lines(["a", "bb", "c", "d"], pairs)
    assert head.split() == ["(1)", "(2)", "(3)", "(4)"]
    assert [line.split()[:2] for line in lines[:4]] == [
        [f"({n})", name] for n, name in enumerate(["a", "bb", "c", "d"], 1)
    ]
    assert lines[4:] == (["* one person"] if any(pair.is_same for pair in pairs) else [])
    star = "*" if pairs[5].is_same else ""
    assert lines[2].split()[-1] == f"{pairs[5].cosine:.3f}{star}"
    assert lines[3].split()[-1] == f"{pairs[5].cosine:.3f}{star}"


@pytest.mark.parametrize("threshold", [None, Threshold(0.0)])
def test_pictures(rng, threshold):
    faces = rng.integers(0, 256, (3, 40, 40, 3), np.uint8)
    vectors = normalized(rng.normal(size=(3, 8)).astype(np.float32))
    two = draw_comparison(faces[:2], ["a", "b"], compare(vectors[:2], threshold), ["title"])
    three = draw_comparison(faces, ["a", "b", "c"], compare(vectors, threshold))
    assert three.shape[0] > 4 * 112 > two.shape[0]
    assert three.shape[1] > 4 * 112


def test_without_a_curve_the_thresholds_bound_the_rate():
    points = [(0.2, 0.1), (0.5, 0.01)]
    calibration = Calibration("x", 100, points, [Threshold(*point) for point in points], 0.3)
    rates = [calibration.false_accept_rate(cosine) for cosine in (0.1, 0.3, 0.6)]
    assert rates == [1.0, 0.1, 0.01]
