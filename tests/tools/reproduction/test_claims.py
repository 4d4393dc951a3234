import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from dsoftmax.tools.reproduction.claims import (
    CLAIMS,
    FAILS,
    HOLDS,
    UNDECIDED,
    Difference,
    judge,
    judge_all,
    paired_difference,
)
from dsoftmax.tools.reproduction.grid import Setting, fixed_cells, tuned_cells
from dsoftmax.tools.reproduction.scales import setting_of


def test_the_interval_is_that_of_a_paired_t_test(rng):
    first = rng.normal(size=5)
    second = first - 0.3 + 0.2 * rng.normal(size=5)
    difference = paired_difference(first, second)
    expected = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert difference.mean == pytest.approx(np.mean(first - second))
    assert difference[1:3] == pytest.approx((expected.low, expected.high))
    assert difference.pairs == 5


def test_one_pair_decides_nothing():
    difference = paired_difference([1.0], [0.0])
    assert difference == (1.0, -math.inf, math.inf, 1)
    assert judge(difference) == UNDECIDED


@pytest.mark.parametrize(
    ("low", "high", "margin", "verdict"),
    [
        (0.1, 0.3, 0, HOLDS),
        (-0.1, 0.3, 0, UNDECIDED),
        (-0.3, -0.1, 0, FAILS),
        (-0.1, 0.3, 0.2, HOLDS),
        (-0.3, 0.3, 0.2, UNDECIDED),
        (-0.5, -0.3, 0.2, FAILS),
    ],
)
def test_judge(low, high, margin, verdict):
    assert judge(Difference((low + high) / 2, low, high, 5), margin) == verdict


@pytest.mark.parametrize(
    ("verdicts", "together"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([HOLDS, UNDECIDED], UNDECIDED),
        ([UNDECIDED, FAILS, HOLDS], FAILS),
        ([], UNDECIDED),
    ],
)
def test_a_claim_holds_if_all_of_it_does(verdicts, together):
    assert judge_all(verdicts) == together


def test_claims_are_about_cells_that_exist():
    groups = tuned_cells(64)
    best = {name: group[0] for name, group in groups.items()}
    known = {cell.name for group in groups.values() for cell in group}
    known |= set(fixed_cells(best, 64)) | set(groups)
    for claim in CLAIMS:
        for comparison in claim.comparisons:
            assert {comparison.first, comparison.second} <= known


def test_trials_of_a_seed_begin_alike_and_differ_in_the_loss_alone():
    best = {name: group[0] for name, group in tuned_cells(64).items()}
    cells = fixed_cells(best, 64)
    setting = Setting(
        "name", "title", "data", 16, 64, 5, {"lr": 0.1}, (cells["rand-softmax"], {"max-steps": 9})
    )
    one, other = (setting.trial(cells[name], 3) for name in ("softmax", "k-more"))
    assert one.begin == other.begin
    assert one.begin.flags == {"lr": 0.1, "max-steps": 9}
    assert one.begin.begin is None
    assert one.flags == other.flags
    assert one.name != other.name != setting.trial(cells["k-more"], 4).name
    assert type(one).from_json(dataclasses.asdict(one)) == one


def test_a_setting_without_a_foundation_begins_with_random_weights():
    options = {"data": "data", "scale": 16, "part": 64, "seeds": 2, "max_steps": 5}
    for steps, begins in ((0, False), (7, True)):
        setting = setting_of("name", "title", foundation_steps=steps, **options)
        trial = setting.trial(fixed_cells({}, 64)["softmax"], 1)
        assert (trial.begin is not None) is begins
        assert trial.flags["max-steps"] == 5
