import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from scipy import stats

from dsoftmax import losses
from dsoftmax.losses.samplers import BATCH_CLASSES, RandomClasses, RandomRows


def draw_many(sampler, labels, steps):
    return [sampler.draw(step, np.asarray(labels)) for step in range(steps)]


@pytest.mark.parametrize("rate", [1 / 64, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("batch_classes", BATCH_CLASSES)
def test_exact_count_sorted_and_never_a_label(rate, batch_classes):
    num_classes, labels = 640, [3, 3, 639, 0, 17]
    sampler = RandomClasses(num_classes, rate, batch_classes)
    for draw in draw_many(sampler, labels, 20):
        assert not set(draw.classes) & set(labels)
        assert (np.diff(draw.classes) > 0).all()
        assert draw.classes.min() >= 0
        assert draw.classes.max() < num_classes
        wanted = round(rate * num_classes)
        if batch_classes == "counted":  # the labels are among them
            assert len(draw.classes) + 4 == max(wanted, 4)
        else:  # the labels leave no more
            assert len(draw.classes) == min(wanted, num_classes - 4)
        assert draw.labels_are_negatives is (batch_classes != "excluded")


def test_at_least_one():
    assert len(RandomClasses(10, 0.001, "excluded").draw(0, np.array([1])).classes) == 1
    assert len(RandomRows(0.001).draw(0, np.arange(10)).samples) == 1


def test_labels_are_kept_beyond_the_rate():
    """Partial FC's first version dropped positives then."""
    draw = RandomClasses(100, 0.02, "counted").draw(0, np.arange(10))
    assert len(draw.classes) == 0
    assert draw.labels_are_negatives


def test_no_class_is_left():
    draw = RandomClasses(3, 1.0, "excluded").draw(0, np.array([0, 1, 2]))
    assert len(draw.classes) == 0


def test_fresh_each_step_and_a_function_of_the_seed():
    labels = np.array([1, 2])
    sampler, same, other = (RandomClasses(1000, 0.1, "excluded", seed=seed) for seed in (4, 4, 5))
    first, second = (sampler.draw(step, labels).classes for step in (0, 1))
    assert first.tolist() != second.tolist()
    assert first.tolist() == same.draw(0, labels).classes.tolist()
    assert first.tolist() != other.draw(0, labels).classes.tolist()


@pytest.mark.parametrize("batch_classes", BATCH_CLASSES)
def test_classes_are_uniform(batch_classes, seed):
    num_classes, labels, steps = 50, np.array([0, 7, 7, 49]), 2000
    sampler = RandomClasses(num_classes, 0.2, batch_classes, seed=seed)
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


@pytest.mark.parametrize("batch_classes", BATCH_CLASSES)
@pytest.mark.parametrize("preset", ["dsoftmax_k", "rand_softmax"])
def test_corrected_n_is_near_the_full_one(preset, batch_classes, rng):
    """The expected sum over the drawn negatives, corrected, is that over all."""
    weights, x = rng.normal(size=(500, 16)), nd.array(rng.normal(size=(8, 16)))
    labels = rng.integers(0, 500, 8)

    def sums(correction, steps):
        head = losses.create(
            preset,
            500,
            16,
            scale=4,
            sample_rate=0.1,
            batch_classes=batch_classes,
            correction=correction,
            seed=2,
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
    assert head.sampler.batch_classes == "counted"


@pytest.mark.parametrize(
    ("preset", "batch_classes", "negatives"),
    [
        ("dsoftmax_k", None, 50),
        ("dsoftmax_k", "counted", 50 - 1),
        ("dsoftmax_k", "added", 50 + 3 - 1),
        ("rand_softmax", None, 50 - 1),
        ("rand_softmax", "excluded", 50),
        ("rand_arcface", "added", 50 + 3 - 1),
        ("hf_softmax", "added", 50 + 3 - 1),
        ("nsoftmax", None, 500 - 1),
    ],
)
def test_stats_count_the_negatives_of_a_sample(preset, batch_classes, negatives, rng):
    options = {"batch_classes": batch_classes} if batch_classes else {}
    if preset != "nsoftmax":
        options["sample_rate"] = 0.1
    head = losses.create(preset, 500, 16, **options)
    head.load_class_weights(rng.normal(size=(500, 16)))
    head(nd.array(rng.normal(size=(4, 16))), np.array([1, 1, 2, 3]))
    assert head.stats["negatives"] == negatives


def test_unknown_batch_classes():
    with pytest.raises(ValueError, match="excluded, counted, added, not 'both'"):
        losses.create("rand_softmax", 500, 16, batch_classes="both")


@pytest.mark.parametrize(
    ("batch_classes", "batch_size", "is_warned"),
    [("counted", 50, False), ("counted", 51, True), ("added", 99, False), ("excluded", 99, False)],
)
def test_a_warning_where_few_classes_are_random(batch_classes, batch_size, is_warned):
    warning = RandomClasses(1000, 0.1, batch_classes).warn_about(batch_size)
    assert bool(warning) is is_warned
    if is_warned:
        assert "only 49 are random" in warning
