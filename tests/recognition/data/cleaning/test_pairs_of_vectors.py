"""Near pairs, against all pairs; and which of them stay."""

import itertools

import numpy as np
import pytest

from dsoftmax.recognition.common.vectors import normalized
from dsoftmax.recognition.data.cleaning import pairs_of_vectors
from dsoftmax.recognition.data.cleaning.pairs_of_vectors import (
    TooManyPairsError,
    absorb,
    near_pairs,
)


@pytest.mark.parametrize("count", [1, 6, 7, 50])
def test_near_pairs_are_those_of_all_pairs(rng, monkeypatch, count):
    monkeypatch.setattr(pairs_of_vectors, "ROWS_PER_BLOCK", 7)
    vectors = normalized(rng.normal(size=(count, 6))).astype(np.float32)
    pairs, cosines = near_pairs(vectors, 0.4)
    expected = {
        (one, other): vectors[one] @ vectors[other]
        for one, other in itertools.combinations(range(count), 2)
        if vectors[one] @ vectors[other] >= 0.4
    }
    assert len(pairs) == len(expected)
    for pair, cosine in zip(pairs.tolist(), cosines):
        assert cosine == pytest.approx(expected[tuple(pair)], abs=1e-5)


def test_too_many_pairs_are_refused(monkeypatch):
    monkeypatch.setattr(pairs_of_vectors, "MOST_PAIRS_PER_VECTOR", 2)
    with pytest.raises(TooManyPairsError, match=r"cosine of 0\.500"):
        near_pairs(np.ones((10, 1), np.float32), 0.5)


def test_the_first_takes_in_its_neighbours_and_no_chain_goes_on():
    chain = np.array([[0, 1], [1, 2], [2, 3], [3, 4]])
    assert absorb(chain, np.arange(5)) == {1: 0, 3: 2}
    assert absorb(chain, np.array([2, 1, 0, 3, 4])) == {1: 2, 3: 2}
    assert absorb(np.empty((0, 2), int), np.arange(5)) == {}
