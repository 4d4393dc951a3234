"""Centres of identities, against plain loops."""

import numpy as np
import pytest

from dsoftmax.recognition.common.vectors import normalized
from dsoftmax.recognition.data.cleaning import centres
from dsoftmax.recognition.data.cleaning.centres import Members, find_centres


def geometric_median(rows):
    """Weiszfeld's iteration to its end, for one identity."""
    median = rows.mean(axis=0)
    for _ in range(500):
        weights = 1 / np.maximum(np.linalg.norm(rows - median, axis=1), 1e-3)
        median = weights @ rows / weights.sum()
    return median, 1 / np.maximum(np.linalg.norm(rows - median, axis=1), 1e-3)


def test_members_of_labels_with_gaps_in_any_order(rng, monkeypatch):
    monkeypatch.setattr(centres, "ROWS_PER_BLOCK", 7)
    labels = rng.integers(0, 9, 50) * 4
    members = Members.of(labels)
    assert members.labels.tolist() == sorted(set(labels))
    for identity, label in enumerate(members.labels):
        assert members.images(identity).tolist() == np.flatnonzero(labels == label).tolist()
    assert (members.labels[members.identity_of_image] == labels).all()
    blocks = list(members.blocks())
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
    assert blocks[-1][1] == len(members)
    for start, stop in blocks:
        assert members.counts[start:stop].sum() <= 7 or stop == start + 1


def test_centres_and_cosines_against_a_plain_loop(rng, monkeypatch):
    monkeypatch.setattr(centres, "ROWS_PER_BLOCK", 10)
    monkeypatch.setattr(centres, "ITERATIONS", 200)
    labels = rng.integers(0, 8, 60)
    people = rng.normal(size=(8, 16))
    embeddings = (3 * people[labels] + rng.normal(size=(60, 16))).astype(np.float32)
    members = Members.of(labels)
    found = find_centres(members, embeddings)
    unit = normalized(embeddings.astype(np.float64))
    for identity, label in enumerate(members.labels):
        rows = unit[labels == label]
        median, weights = geometric_median(rows)
        expected = median / np.linalg.norm(median)
        np.testing.assert_allclose(found.vectors[identity], expected, atol=2e-3)
        for place, image in enumerate(np.flatnonzero(labels == label)):
            others = np.delete(weights[:, None] * rows, place, axis=0).sum(axis=0)
            cosine = rows[place] @ others / np.linalg.norm(others)
            assert found.cosines[image] == pytest.approx(cosine, abs=2e-3)


def test_a_centre_stays_where_most_images_are(rng):
    """Two of five images are of one other person: their mean is drawn to them, a median is not."""
    person, other = np.eye(64)[:2]
    rows = np.stack([person] * 3 + [other] * 2) + 0.02 * rng.normal(size=(5, 64))
    found = find_centres(Members.of(np.zeros(5, int)), rows.astype(np.float32))
    mean = rows.mean(axis=0) / np.linalg.norm(rows.mean(axis=0))
    assert mean @ person < 0.85
    assert found.vectors[0] @ person > 0.95
    assert (found.cosines[:3] > 0.8).all()
    assert (found.cosines[3:] < 0.6).all()


def test_single_and_unreadable_images():
    rows = np.array([[3, 4], [0, 0], [1, 0], [1, 0], [0, 0]], np.float32)
    found = find_centres(Members.of(np.array([0, 1, 2, 2, 2])), rows)
    assert found.cosines.tolist() == pytest.approx([1, 0, 1, 1, 0])
    np.testing.assert_allclose(found.vectors[2], [1, 0], atol=1e-6)
