"""The verdict follows from the numbers."""

import csv
import json

import numpy as np
import pytest

from dsoftmax.recognition.log import METRICS, SCORES, TIMES
from dsoftmax.recognition.report.run_folder import RunFolder
from dsoftmax.recognition.report.verdict import find_trend, judge
from tests.recognition.runs import folder_of


def write_table(path, columns, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="nan", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def run(flags):
    """Return a function that writes the files of a run and reads them."""

    def write(losses, total=1000, scores=(), times=(), diverged=None, rate=None, **columns):
        from dsoftmax.recognition.settings import parse

        made = flags(max_steps=total, lr=0.1)
        folder = folder_of(made)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(
            json.dumps({**parse(made).as_json(), "resolved_total_steps": total})
        )
        steps = np.linspace(0, 1000, len(losses) + 1)[1:].astype(int)
        rates = [0.0] * len(losses) if rate is None else rate
        constant = {"positive_cosine": 0.7, "accuracy": 0.9, **columns}
        rows = [
            {"step": step, "loss": loss, "lr": one, **constant}
            for step, loss, one in zip(steps, losses, rates)
        ]
        write_table(folder / "metrics.csv", METRICS, rows)
        write_table(folder / "verification.csv", SCORES, scores)
        write_table(folder / "times.csv", TIMES, times)
        if diverged:
            (folder / "diverged.json").write_text(json.dumps(diverged))
        return RunFolder(str(folder))

    return write


def noisy(rng, values):
    return np.array(values) + rng.normal(0, 0.005, len(values))


FLAT, FALLING, RISING = [2.0] * 100, np.linspace(10, 2, 100), np.linspace(2, 10, 100)


@pytest.mark.parametrize(
    ("losses", "options", "kind", "headline", "advice"),
    [
        (FALLING, {}, "good", "Still improving after 1,000 steps", "--max-steps 2000"),
        (FALLING, {"total": 2000}, "good", "improving at step 1,000 of 2,000", "--resume"),
        (FLAT, {}, "good", "Converged", ""),
        (FLAT, {"rate": [0.1] * 100}, "fair", "Level after 1,000 steps", "--lr-steps"),
        (FLAT, {"accuracy": 0.01, "positive_cosine": 0.0}, "bad", "not begun to learn", "--scale"),
        (FLAT, {"accuracy": 0.3}, "fair", "few images are learnt", "larger network"),
        (FALLING[::12], {}, "good", "Still improving", ""),
        (RISING, {}, "bad", "Getting worse", "--lr 0.033"),
        ([2.0] * 3, {}, "fair", "Too early", ""),
        ([], {}, "fair", "Too early", "--frequent"),
    ],
)
def test_course_of_the_loss(run, rng, losses, options, kind, headline, advice):
    found = judge(run(noisy(rng, losses), **options))
    assert found.kind == kind
    assert headline in found.headline
    assert advice in " ".join(found.advice)


def test_diverged_unless_the_run_got_past_it(run):
    diagnosis = {"step": 1000, "lr": 1000.0, "error": "the loss is not finite", "not_finite": ["x"]}
    found = judge(run(FLAT, diverged=diagnosis))
    assert (found.kind, "Diverged at step 1,000" in found.headline) == ("bad", True)
    assert "--lr 0.01" in found.advice[0]
    found = judge(run(FLAT, diverged={**diagnosis, "step": 400}))
    assert "Diverged" not in found.headline


def test_verification(run):
    def score(step, accuracy):
        row = {"target": "lfw", "deviation": 0.01, "xnorm": 1}
        return {"step": step, "accuracy": accuracy, **row}

    found = judge(run(FLAT, scores=[score(500, 0.95), score(1000, 0.93)]))
    assert "lfw: 93.00% of the pairs are judged rightly; best 95.00% at step 500." in found.findings
    assert "lfw was better by 2.00% at step 500" in " ".join(found.advice)
    found = judge(run(FLAT, scores=[score(500, 0.951), score(1000, 0.95)]))
    assert "was better" not in " ".join(found.advice)
    found = judge(run(FLAT, accuracy=0.99, scores=[score(1000, 0.8)]))
    assert "learnt by heart" in " ".join(found.advice)
    assert "There is no verification" in " ".join(judge(run(FLAT)).advice)


def test_cosines_and_speed(run):
    found = judge(run(FLAT, accuracy=0.95, positive_cosine=0.4), termination=0.9)
    assert "Images stay 0.50 below" in " ".join(found.advice)
    assert "the loss pulls until 0.90" in found.findings[0]
    assert "below" not in " ".join(judge(run(FLAT, accuracy=0.95), termination=0.9).advice)
    slow = {"step": 1000, "data": 0.06, "network": 0.03, "head": 0.005, "update": 0.005}
    assert "60% of a step is spent waiting" in " ".join(judge(run(FLAT, times=[slow])).advice)
    quick = {**slow, "data": 0.001}
    assert "waiting" not in " ".join(judge(run(FLAT, times=[quick])).advice)


def test_noise_is_no_trend(rng):
    """Of many flat courses very few seem to have a trend: three standard deviations."""
    seen = [find_trend(rng.normal(1, 0.2, 100)).change != 0 for _ in range(300)]
    assert np.mean(seen) < 0.05
    assert find_trend(np.ones(5)) is None
