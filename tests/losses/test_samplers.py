import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from scipy import stats

from dsoftmax import losses
from dsoftmax.losses.samplers import RandomClasses, RandomRows


def draw_many(sampler, labels, steps):
    return [sampler.draw(step, np.asarray(labels)) for step in range(steps)]


@pytest.mark.parametrize("rate", [1 / 64, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("exclude", [True, False])
def test_exact_count_sorted_and_never_a_label(rate, exclude):
    num_classes, labels = 640, [3, 3, 639, 0, 17]
    sampler = RandomClasses(num_classes, rate, exclude)
    for draw in draw_many(sampler, labels, 20):
        assert not set(draw.classes) & set(labels)
        assert (np.diff(draw.classes) > 0).all()
        assert draw.classes.min() >= 0
        assert draw.classes.max() < num_classes
        wanted = round(rate * num_classes)
        if exclude:  # the labels leave no more
            assert len(draw.classes) == min(wanted, num_classes - 4)
        else:  # the labels are among them
            assert len(draw.classes) + 4 == max(wanted, 4)
        assert draw.labels_are_negatives is not exclude


def test_at_least_one():
    assert len(RandomClasses(10, 0.001, True).draw(0, np.array([1])).classes) == 1
    assert len(RandomRows(0.001).draw(0, np.arange(10)).samples) == 1


def test_labels_are_kept_beyond_the_rate():
    """Partial FC's first version dropped positives then."""
    draw = RandomClasses(100, 0.02, False).draw(0, np.arange(10))
    assert len(draw.classes) == 0
    assert draw.labels_are_negatives


def test_no_class_is_left():
    draw = RandomClasses(3, 1.0, True).draw(0, np.array([0, 1, 2]))
    assert len(draw.classes) == 0


def test_fresh_each_step_and_a_function_of_the_seed():
    labels = np.array([1, 2])
    sampler, same = RandomClasses(1000, 0.1, True, seed=4), RandomClasses(1000, 0.1, True, seed=4)
    other = RandomClasses(1000, 0.1, True, seed=5)
    first, second = (sampler.draw(step, labels).classes for step in (0, 1))
    assert first.tolist() != second.tolist()
    assert first.tolist() == same.draw(0, labels).classes.tolist()
    assert first.tolist() != other.draw(0, labels).classes.tolist()


@pytest.mark.parametrize("exclude", [True, False])
def test_classes_are_uniform(exclude, seed):
    num_classes, labels, steps = 50, np.array([0, 7, 7, 49]), 2000
    sampler = RandomClasses(num_classes, 0.2, exclude, seed=seed)
    counts = np.zeros(num_classes)
    for draw in draw_many(sampler, labels, steps):
        counts[draw.classes] += 1
    assert counts[labels].sum() == 0
    others = np.delete(counts, np.unique(labels))
    # Without replacement the counts vary less than chi-square assumes: a cautious test.
    assert stats.chisquare(others).pvalue > 1e-4
    # and it can fail: a sampler that is off by a fifth on half of the classes would
    skewed = others * np.where(np.arange(len(others)) % 2, 1.1, 0.9)
    assert stats.chisquare(skewed * others.sum() / skewed.sum()).pvalue < 1e-4


def test_rows():
    sampler = RandomRows(0.25, seed=1)
    counts = np.zeros(16)
    for step in range(2000):
        rows = sampler.draw(step, np.zeros(16, int)).samples
        assert len(rows) == 4
        assert (np.diff(rows) > 0).all()
        counts[rows] += 1
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("preset", ["dsoftmax_k", "rand_softmax"])
def test_corrected_n_is_near_the_full_one(preset, rng):
    """The expected sum over the drawn negatives, corrected, is that over all."""
    weights, x = rng.normal(size=(500, 16)), nd.array(rng.normal(size=(8, 16)))
    labels = rng.integers(0, 500, 8)

    def sums(correction, steps):
        head = losses.create(
            preset, 500, 16, scale=4, sample_rate=0.1, correction=correction, seed=2
        )
        head.load_class_weights(weights)
        total = 0
        for step in range(steps):
            head.step = step
            head(x, labels)
            total = total + np.exp(head._updates.latest.figures().negatives.n.asnumpy())
        return total / steps

    full = losses.create("nsoftmax", 500, 16, scale=4)
    full.load_class_weights(weights)
    full(x, labels)
    expected = np.exp(full._updates.latest.figures().negatives.n.asnumpy())
    corrected, plain = sums("logq", 400), sums(None, 50)
    np.testing.assert_allclose(corrected, expected, rtol=0.1)
    assert (plain < 0.4 * expected).all()


def test_partial_fc_is_a_preset_with_a_rate():
    head = losses.create("cosface", 1000, 8, sample_rate=0.1, ctx=mx.cpu(0))
    assert isinstance(head.sampler, RandomClasses)
    assert head.sampler.count == 100
    assert not head.sampler.exclude_labels
