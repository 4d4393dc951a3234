"""Thresholds that fit the embeddings."""

import numpy as np
import pytest

from dsoftmax.recognition.common.vectors import normalized
from dsoftmax.recognition.data.cleaning.centres import Members, find_centres
from dsoftmax.recognition.data.cleaning.thresholds import (
    Samples,
    choose_thresholds,
    nearest_strangers,
    sample_cosines,
)

NONE = np.empty(0, np.float32)


def test_an_outlier_is_as_near_as_one_percent_of_strangers(rng):
    strangers = rng.normal(0, 0.1, 100_000).astype(np.float32)
    samples = Samples(strangers, strangers, NONE)
    assert choose_thresholds(samples, 2).outlier == pytest.approx(2.326 * 0.1, abs=0.005)


def test_one_person_is_as_near_as_halves_are_and_nearer_than_strangers(rng):
    strangers = rng.normal(0, 0.1, 100_000).astype(np.float32)
    near, far = (rng.uniform(low, 1, 10_000).astype(np.float32) for low in (0.8, 0.2))
    chosen = choose_thresholds(Samples(strangers, strangers, near), 1000)
    assert chosen.same_person == pytest.approx(0.81, abs=0.005)  # 5 % of the halves are further
    chosen = choose_thresholds(Samples(strangers, strangers, far), 1000)
    pairs = 1000 * 999 / 2
    assert chosen.same_person == pytest.approx(nearest_strangers(strangers, pairs))
    assert chosen.same_person < choose_thresholds(Samples(strangers, strangers, far), 10**6)[1]


@pytest.mark.parametrize("dimensions", [16, 64])
def test_the_nearest_strangers_are_expected(rng, dimensions):
    """The highest cosine of all pairs of random directions, a few times, against a small sample."""
    vectors = [normalized(rng.normal(size=(1000, dimensions))) for _ in range(5)]
    products = [np.triu(rows @ rows.T, 1) for rows in vectors]
    expected = nearest_strangers(products[0][np.triu_indices(100, 1)], 1000 * 999 / 2)
    assert expected == pytest.approx(np.mean([cosines.max() for cosines in products]), abs=0.08)


def test_samples_are_of_whom_they_say(rng):
    """Images of a person are all equal here, and those of two people orthogonal."""
    labels = np.repeat(np.arange(30), 4)
    embeddings = np.eye(30, dtype=np.float32)[labels]
    members = Members.of(labels)
    samples = sample_cosines(members, embeddings, find_centres(members, embeddings))
    assert len(samples.strangers) == 120 * 29
    assert len(samples.strange_centres) == 30 * 29
    assert not samples.strangers.any()
    assert not samples.strange_centres.any()
    assert samples.halves.tolist() == pytest.approx([1.0] * 30)


def test_outliers_do_not_count_as_halves(rng):
    """A wrong image in each identity would draw its half away from the other one."""
    labels = np.repeat(np.arange(30), 5)
    embeddings = np.eye(31, dtype=np.float32)[labels]
    embeddings[::5] = np.eye(31)[30]
    members = Members.of(labels)
    samples = sample_cosines(members, embeddings, find_centres(members, embeddings))
    assert samples.halves.tolist() == pytest.approx([1.0] * 30)


def test_one_identity_has_nobody_to_be_compared_with():
    members, embeddings = Members.of(np.zeros(3, int)), np.eye(3, dtype=np.float32)
    with pytest.raises(ValueError, match="of one identity"):
        sample_cosines(members, embeddings, find_centres(members, embeddings))
