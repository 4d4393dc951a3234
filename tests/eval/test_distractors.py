"""Ranks among distractors, against sorting all scores."""

import numpy as np
import pytest

from dsoftmax.eval import distractors
from dsoftmax.eval.distractors import rank_distractors


def whole_numbers(rng, count, width=6):
    """Return vectors whose products float32 holds exactly, so that ties are ties."""
    return rng.integers(-3, 4, (count, width)).astype(np.float32)


@pytest.fixture(params=[4, 400, 1 << 27])
def block_bytes(request, monkeypatch):
    monkeypatch.setattr(distractors, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(distractors, "PROBES_PER_BAND", 4)


class TestAgainstBruteForce:
    @pytest.mark.parametrize(
        ("probes", "others", "most"), [(5, 300, 7), (1, 40, 100), (9, 1, 1), (8, 3000, 3)]
    )
    def test_everything(self, rng, block_bytes, probes, others, most):
        one, many = whole_numbers(rng, probes), whole_numbers(rng, others)
        found = rank_distractors(one, many, [10, 100, 10**6], most, tail=0.05, seed=3)
        scores = one @ many.T
        falling = np.sort(scores, axis=1)[:, ::-1]
        np.testing.assert_array_equal(found.top, falling[:, :most])
        kept = int(0.05 * scores.size) + 1
        np.testing.assert_array_equal(np.sort(found.tail), np.sort(scores.ravel())[-kept:])
        assert found.total == scores.size
        order = np.random.default_rng(3).permutation(others)
        assert found.sizes == sorted({size for size in (10, 100) if size < others} | {others})
        for size, best in zip(found.sizes, found.best):
            np.testing.assert_array_equal(best, scores[:, order[:size]].max(axis=1))

    def test_ranks_count_ties_against_the_mate(self, rng, block_bytes):
        one, many = whole_numbers(rng, 6), whole_numbers(rng, 200)
        most = 20
        found = rank_distractors(one, many, [10], most)
        probes, mates = rng.integers(0, 6, 300), rng.integers(-5, 40, 300).astype(np.float32)
        scores = one @ many.T
        expected = [
            1 + sum(score >= mate for score in scores[probe]) for probe, mate in zip(probes, mates)
        ]
        ranks = found.ranks(probes, mates)
        np.testing.assert_array_equal(ranks, np.minimum(expected, most + 1))
        assert (np.array(expected) > most).any()
        assert any(mate in scores[probe] for probe, mate in zip(probes, mates))
        rates = found.rank1_rates(probes, mates)
        assert rates[200] == np.mean(np.array(expected) == 1)
        assert rates[10] >= rates[200]

    def test_some_of_the_distractors(self, rng):
        one, many = whole_numbers(rng, 3), whole_numbers(rng, 50)
        among = np.flatnonzero(rng.random(50) < 0.5)
        found, expected = (
            rank_distractors(one, some, [10], 5, among=rows)
            for some, rows in ((many, among), (many[among], None))
        )
        for value, other in zip(found, expected):
            np.testing.assert_array_equal(value, other)


def test_rank_one_falls_with_the_number_of_distractors(rng):
    one, many = rng.normal(size=(20, 8)), rng.normal(size=(3000, 8))
    found = rank_distractors(one.astype(np.float32), many.astype(np.float32), [10, 100, 1000])
    rates = list(found.rank1_rates(np.arange(20), np.full(20, 4.0)).values())
    assert rates == sorted(rates, reverse=True)


def test_nothing_to_rank():
    with pytest.raises(ValueError, match="0 probes and 3 distractors"):
        rank_distractors(np.zeros((0, 4), np.float32), np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match="2 probes and 0 distractors"):
        rank_distractors(np.zeros((2, 4), np.float32), np.zeros((0, 4), np.float32))
