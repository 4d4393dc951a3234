import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from scipy import stats

from dsoftmax import losses
from dsoftmax.losses.samplers import BATCH_CLASSES, RandomClasses, RandomRows, SampleRate


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
    assert head.sampler.count_random(0, 0) == 100
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


class TestSampleRate:
    def test_a_schedule(self):
        rate = SampleRate([(0, 0.1), (5, 0.5), (8, 1)])
        assert [rate.at(step) for step in (0, 4, 5, 7, 8, 10**9)] == [0.1, 0.1, 0.5, 0.5, 1, 1]
        assert rate.count(0, 203) == 20
        assert rate.count(0, 3) == 1

    @pytest.mark.parametrize(
        ("rate", "message"),
        [
            (0, r"must lie in \(0, 1\], not 0"),
            ([(0, 0.1), (5, 2)], r"must lie in \(0, 1\], not 2"),
            ([(1, 0.1)], r"must begin with 0 and rise, not be \[1\]"),
            ([(0, 0.1), (9, 0.2), (9, 0.3)], "must begin with 0 and rise"),
            ([], "must begin with 0"),
            ([0.1, 0.2], "a number or pairs"),
        ],
    )
    def test_bad_schedules(self, rate, message):
        with pytest.raises(ValueError, match=message):
            SampleRate(rate)

    @pytest.mark.parametrize("store", ["device", "host"])
    def test_sampled_first_and_full_at_the_end(self, store):
        options = {"sample_rate": [(0, 0.1), (2, 1.0)], "store": store}
        head = losses.create("cosface", 200, 6, **options)
        head.initialize(mx.init.Normal(0.1))
        full = losses.create("cosface", 200, 6)
        full.load_class_weights(head.class_weights())
        x, labels = nd.random.normal(shape=(4, 6)), np.array([3, 5, 5, 7])
        touched = []
        for head.step in range(4):
            loss = head(x, labels).asnumpy()
            touched.append(head.stats["rows_touched"])
        assert touched == [20, 20, 200, 200]
        np.testing.assert_allclose(loss, full(x, labels).asnumpy(), rtol=1e-5)
        # Where the weights are on the device, all of them are used in place.
        assert (head.sampler.draw(3, labels).classes is None) is (store == "device")

    def test_rows_take_a_schedule_too(self):
        sampler = RandomRows([(0, 0.25), (3, 1.0)])
        assert [len(sampler.draw(step, np.arange(8)).samples) for step in (2, 3)] == [2, 8]
        assert "0.25, 1 from step 3 on of the samples" in repr(sampler)

    def test_memory_is_that_of_the_largest_rate(self):
        spec = losses.resolve("cosface", {"sample_rate": [(0, 0.1), (5, 0.5)]})
        assert spec.sampled_share == 0.5


def test_the_classes_of_the_batch_alone(rng):
    head = losses.create("dsoftmax", 500, 6, negatives="batch", store="host")
    head.load_class_weights(rng.normal(size=(500, 6)))
    before = head.class_weights()
    x, labels = nd.array(rng.normal(size=(4, 6))), np.array([1, 1, 2, 3])
    with autograd.record():
        loss = head(x, labels)
    loss.backward()
    head.trainer("sgd").step(4)
    assert head.stats["negatives"] == 2
    changed = np.flatnonzero((head.class_weights() != before).any(axis=1))
    np.testing.assert_array_equal(changed, [1, 2, 3])
    small = losses.create("dsoftmax", 3, 6)
    small.load_class_weights(before[1:4])
    np.testing.assert_allclose(small(x, labels - 1).asnumpy(), loss.asnumpy(), rtol=1e-5)


def test_mixed_negatives(rng):
    """The batch's classes, the nearest two of each sample, and random ones up to the rate."""
    weights = rng.normal(size=(500, 6)).astype(np.float32)
    options = {"negatives": "mixed", "sample_rate": 0.1, "nearest": 2, "trees": 50}
    head = losses.create("arcface", 500, 6, seed=3, **options)
    head.load_class_weights(weights)
    x, labels = rng.normal(size=(4, 6)).astype(np.float32), np.array([1, 1, 2, 3])
    draws = [head.sampler.draw(step, labels, nd.array(x)) for step in range(6)]
    assert {len(draw.classes) for draw in draws} == {50 - 3}
    assert all(draw.labels_are_negatives for draw in draws)
    cosines = x @ weights.T / np.linalg.norm(weights, axis=1)
    cosines[:, labels] = -np.inf
    nearest = np.unique(np.argsort(-cosines, axis=1)[:, :2])
    always = set.intersection(*(set(draw.classes) for draw in draws))
    assert len(always & set(nearest)) >= len(nearest) - 1  # the forest is approximate
    assert len(always) <= 4 * 3 + 2  # the others are random
    with pytest.raises(ValueError, match="nearest must be 1 or more"):
        losses.create("arcface", 500, 6, **{**options, "nearest": 0})
