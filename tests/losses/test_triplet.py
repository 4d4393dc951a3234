"""Triplet losses and the choice of triplets, against naive twins in float64."""

import math

import numpy as np
import pytest
from mxnet import autograd, nd

from dsoftmax.losses import triplet
from dsoftmax.losses.triplet import TripletHead, TripletLoss, pick_triplets


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def naive_loss(anchor, positive, negative, alpha, on_angles):
    """The loss of one triplet, from the formula."""
    a, p, n = (unit(vector.astype(np.float64)) for vector in (anchor, positive, negative))
    if on_angles:
        difference = math.acos(a @ p) - math.acos(a @ n)
    else:
        difference = ((a - p) ** 2).sum() - ((a - n) ** 2).sum()
    return max(0.0, difference + alpha)


def naive_triplets(embeddings, classes, alpha, max_ap, random):
    """All pairs, and all negatives of each, one by one."""
    exact = embeddings.astype(np.float64)
    count, found = len(exact), []
    for a in range(count):
        for p in range(a + 1, count):
            if classes[a] != classes[p]:
                continue
            to_p = ((exact[a] - exact[p]) ** 2).sum()
            if max_ap > 0 and to_p > max_ap:
                continue
            legal = [
                n
                for n in range(count)
                if classes[n] != classes[a]
                and to_p < ((exact[a] - exact[n]) ** 2).sum() < to_p + alpha
            ]
            if legal:
                found.append((a, p, legal[random.integers(len(legal))]))
    return found


def make_head(name="triplet", block=6, alpha=0.5, width=4):
    return TripletHead(triplet.resolve(name, {"alpha": alpha}), width, block)


@pytest.mark.parametrize("on_angles", [False, True])
def test_the_loss(rng, on_angles):
    rows = rng.normal(size=(3, 20, 5)).astype(np.float32)
    expected = [naive_loss(*one, 0.4, on_angles) for one in rows.swapaxes(0, 1)]
    assert 0 in expected
    assert max(expected) > 0.4
    found, *_ = TripletLoss(0.4, on_angles)(*map(nd.array, rows))
    np.testing.assert_allclose(found.asnumpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("on_angles", [False, True])
def test_its_gradient(rng, on_angles):
    rows = rng.normal(size=(3, 6, 5))
    arrays = [nd.array(part) for part in rows]
    for array in arrays:
        array.attach_grad()
    criterion = TripletLoss(1.0, on_angles)
    criterion.hybridize()
    with autograd.record():
        loss, *_ = criterion(*arrays)
    loss.backward()

    def total(changed):
        return sum(naive_loss(*one, 1.0, on_angles) for one in changed.swapaxes(0, 1))

    for part, array in enumerate(arrays):
        numeric = np.zeros(rows[part].shape)
        for place in np.ndindex(*numeric.shape):
            step = np.zeros(rows.shape)
            step[(part, *place)] = 1e-6
            numeric[place] = (total(rows + step) - total(rows - step)) / 2e-6
        assert numeric.any()
        np.testing.assert_allclose(array.grad.asnumpy(), numeric, rtol=1e-3, atol=1e-4)


def test_equal_images_have_a_finite_gradient():
    same = nd.array([[3.0, 4.0]])
    same.attach_grad()
    with autograd.record():
        loss, *_ = TripletLoss(0.3, on_angles=True)(same, same, same)
    loss.backward()
    assert loss.asscalar() == pytest.approx(0.3)
    assert np.isfinite(same.grad.asnumpy()).all()


@pytest.mark.parametrize("name", triplet.TITLES)
def test_a_batch_is_blocks_of_anchors_positives_negatives(rng, name):
    head = make_head(name)
    blocks = rng.normal(size=(2, 3, 2, 4)).astype(np.float32)  # two devices, two triplets each
    embeddings = nd.array(blocks.reshape(-1, 4))
    embeddings.attach_grad()
    head.begin_update(None)
    with autograd.record():
        loss = head(embeddings, None)
    loss.backward()
    triplets = blocks.transpose(0, 2, 1, 3).reshape(-1, 3, 4)
    expected = np.array([naive_loss(*one, 0.5, name == "atriplet") for one in triplets])
    of_images = np.repeat(expected.reshape(2, 1, 2), 3, axis=1).ravel()
    np.testing.assert_allclose(loss.asnumpy(), of_images, rtol=1e-4, atol=1e-5)
    assert head.read_loss() == pytest.approx(expected.mean(), rel=1e-4)
    cosines = [(unit(a) @ unit(p), unit(a) @ unit(n)) for a, p, n in triplets]
    found = head.stats
    assert found["accuracy"] == np.mean([to_p > to_n for to_p, to_n in cosines])
    assert found["positive_cosine"] == pytest.approx(np.mean([c[0] for c in cosines]), abs=1e-5)
    assert found["max_negative_cosine"] == pytest.approx(max(c[1] for c in cosines), abs=1e-5)


def test_micro_batches_add_up(rng):
    head, batches = make_head(), rng.normal(size=(2, 6, 4))
    head.begin_update(None)
    losses = [head(nd.array(batch), None).asnumpy().mean() for batch in batches]
    assert head.read_loss() == pytest.approx(np.mean(losses), rel=1e-5)
    head.begin_update(None)
    head(nd.array(batches[0]), None)
    assert head.read_loss() == pytest.approx(losses[0], rel=1e-5)


def test_what_is_not_finite_is_noticed():
    head = make_head()
    head.begin_update(None)
    head(nd.array(np.full((6, 4), np.nan)), None)
    with pytest.raises(ValueError, match="not finite"):
        head.read_loss()


@pytest.mark.parametrize(("alpha", "max_ap"), [(0.3, 0.0), (0.2, 2.0), (4.0, 0.0)])
def test_the_choice_of_triplets(rng, alpha, max_ap, monkeypatch):
    monkeypatch.setattr(triplet, "ANCHORS_AT_ONCE", 7)
    classes = np.repeat([4, 0, 7, 1, 2, 3, 9], [5, 1, 4, 5, 3, 5, 5])
    embeddings = unit(rng.normal(size=(28, 3))).astype(np.float32)
    expected = naive_triplets(embeddings, classes, alpha, max_ap, np.random.default_rng(3))
    found = pick_triplets(embeddings, classes, alpha, max_ap, np.random.default_rng(3))
    assert 5 < len(expected) <= 10 + 6 + 10 + 3 + 10 + 10
    assert sorted(map(tuple, found.tolist())) == expected
    assert found.tolist() != [list(one) for one in expected]  # shuffled


def test_no_triplets():
    embeddings = np.eye(4, dtype=np.float32)
    found = pick_triplets(embeddings, np.arange(4), 0.3, 0.0, np.random.default_rng(0))
    assert found.shape == (0, 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sample_rate": 0.5}, TypeError, "no classes and no option sample_rate; legal are alpha"),
        ({"alpha": 0}, ValueError, "alpha"),
        ({"alpha": "much"}, ValueError, "alpha is a number like 0.3, not 'much'"),
        ({"max_ap": -1}, ValueError, "max_ap"),
        ({"bag_size": 2}, ValueError, "bag_size must be a whole number, 3 or more"),
        ({"images_per_identity": 1}, ValueError, "images_per_identity must be a whole number, 2"),
    ],
)
def test_illegal_options(options, error, message):
    with pytest.raises(error, match=message):
        triplet.resolve("triplet", options)
