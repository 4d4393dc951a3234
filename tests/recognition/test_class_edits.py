"""Classes that are moved, joined, dropped and added, against loops over rows."""

import itertools

import numpy as np
import pytest

from dsoftmax.recognition import class_edits
from dsoftmax.recognition.class_edits import LabelMap
from dsoftmax.recognition.common.rows import Rows

K, D = 11, 6


@pytest.fixture
def classes(rng):
    names = ("weight", "state0", "state1")
    return {name: Rows([rng.normal(size=(K, D)).astype(np.float32)]) for name in names}


def naive(classes, groups, added):
    """Return arrays row by row: `groups` maps a new label to (old label, share)s."""
    made = {}
    for name, rows in classes.items():
        old = rows.whole().astype(np.float64)
        new = {}
        for label, members in groups.items():
            if len(members) == 1:
                new[label] = old[members[0][0]]
                continue
            total = sum(share for _, share in members)
            mean = sum(share / total * old[place] for place, share in members)
            if name == "weight":
                length = sum(share / total * np.sqrt(old[p] @ old[p]) for p, share in members)
                mean = mean / np.sqrt(mean @ mean) * length
            new[label] = mean
        for label, vector in added.items():
            new[label] = vector if name == "weight" else np.zeros(D)
        made[name] = np.array([new[label] for label in range(len(new))])
    return made


def assert_same(made, expected, exact=()):
    assert set(made) == set(expected)
    for name, rows in made.items():
        np.testing.assert_allclose(rows.whole(), expected[name], rtol=1e-6, atol=1e-7)
        for label in exact:
            np.testing.assert_array_equal(rows.take([label])[0], expected[name][label])


def test_any_map(classes, rng):
    old = rng.permutation(K)[:9]
    new = np.array([0, 1, 1, 3, 4, 4, 4, 6, 7])
    shares = rng.uniform(0.1, 5, 9)
    added = {2: rng.normal(size=D), 5: rng.normal(size=D), 8: rng.normal(size=D)}
    groups = {}
    for place, label, share in zip(old, new, shares):
        groups.setdefault(int(label), []).append((int(place), share))
    made = class_edits.rearrange(classes, LabelMap.of(old, new, shares), added)
    assert_same(made, naive(classes, groups, added), exact=(0, 3, 6, 7))


def test_dropped(classes):
    labels = class_edits.dropping(K, np.array([0, 4, 10]))
    kept = [1, 2, 3, 5, 6, 7, 8, 9]
    expected = {name: rows.whole()[kept] for name, rows in classes.items()}
    assert_same(class_edits.rearrange(classes, labels), expected, exact=range(8))


@pytest.mark.parametrize("shares", [None, (3.0, 1.0, 2.0)])
def test_merged(classes, shares):
    chosen = np.array([7, 2, 5])
    labels = class_edits.merging(K, chosen, shares)
    groups = {label: [(old, 1)] for label, old in enumerate([0, 1, None, 3, 4, 6, 8, 9, 10])}
    groups[2] = list(zip(chosen, shares or (1, 1, 1)))
    made = class_edits.rearrange(classes, labels)
    assert_same(made, naive(classes, groups, {}), exact=(0, 1, 3, 8))


def test_joined(classes, rng):
    other = {name: Rows([rng.normal(size=(3, D))]) for name in classes}
    made = class_edits.join(classes, other)
    for name, rows in made.items():
        expected = np.concatenate([classes[name].whole(), other[name].whole()])
        np.testing.assert_array_equal(rows.whole(), expected)
    with pytest.raises(ValueError, match=r"2 and 1 states per class: .* the same optimizer"):
        class_edits.join(classes, {name: other[name] for name in ("weight", "state0")})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ([0, 0, 1], [0, 1, 2], "the old label 0 is listed twice"),
        ([0, 1], [0, 2], "1 of the 3 new labels belong to no class, 1 is the first"),
        ([0, 11], [0, 1], "there is no class 11: there are 11, from 0 on"),
    ],
)
def test_maps_that_make_no_sense(classes, old, new, message):
    with pytest.raises(ValueError, match=message):
        class_edits.rearrange(classes, LabelMap.of(old, new))


def test_a_new_class_in_an_old_one_s_place(classes):
    with pytest.raises(ValueError, match="a new class has the label of an old one"):
        class_edits.rearrange(classes, LabelMap.of([0], [0]), {0: np.ones(D)})


def test_what_can_t_be_merged_or_dropped(classes):
    with pytest.raises(ValueError, match="two classes or more, each named once"):
        class_edits.merging(K, np.array([3, 3]))
    with pytest.raises(ValueError, match="all 11 classes would be dropped"):
        class_edits.dropping(K, np.arange(K))
    with pytest.raises(ValueError, match=r"shares are .* not \[0.0, 0.0\]"):
        class_edits.rearrange(classes, class_edits.merging(K, np.array([1, 2]), np.zeros(2)))
    opposite = np.array([[1, 2], [-1, -2], [0, 1]], np.float32)
    with pytest.raises(ValueError, match=r"the classes \[0, 1\] have opposite weights"):
        class_edits.rearrange(
            {"weight": Rows([opposite])}, class_edits.merging(3, np.array([0, 1]))
        )


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_closest_pairs(rng, monkeypatch, count):
    monkeypatch.setattr(class_edits, "COMPARED_AT_ONCE", 7)
    weights = rng.normal(size=(30, 4)).astype(np.float32)
    chosen = np.sort(rng.permutation(30)[:23])
    unit = weights / np.linalg.norm(weights, axis=1, keepdims=True)
    pairs = [(unit[a] @ unit[b], a, b) for a, b in itertools.combinations(chosen, 2)]
    expected = sorted(pairs, reverse=True)[:count]
    found = class_edits.closest_pairs(Rows([weights]), count, chosen)
    assert [(pair.one, pair.other) for pair in found] == [(a, b) for _, a, b in expected]
    np.testing.assert_allclose(
        [pair.cosine for pair in found], [c for c, *_ in expected], atol=1e-6
    )
