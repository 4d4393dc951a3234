"""Updates of several micro-batches against those of one batch with all of their samples."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd

from dsoftmax import losses
from dsoftmax.losses import negatives

CLASSES, WIDTH = 60, 6
RUNNING_MEANS = ["adaface", "curricularface"]
PRESETS = [name for name in losses.names() if name not in ("hf_softmax", *RUNNING_MEANS)]
SIZES = [4, 1, 7]  # of the micro-batches


def train(preset, sizes, updates=4, is_announced=True, **options):
    """Train on 12 samples per update; return the losses, gradients, statistics and weights."""
    rng = np.random.default_rng(3)
    if losses.resolve(preset).negatives != "all":
        options.setdefault("sample_rate", 0.2)
    head = losses.create(preset, CLASSES, WIDTH, seed=5, **options)
    head.initialize(mx.init.Normal(0.1))
    trainer = head.trainer("sgd", {"learning_rate": 0.2, "momentum": 0.9, "wd": 1e-3})
    found, gradients, stats = [], [], []
    borders = np.cumsum([0, *sizes])
    for _ in range(updates):
        samples = rng.normal(size=(borders[-1], WIDTH)).astype(np.float32)
        labels = rng.integers(0, CLASSES, borders[-1])
        labels[-1] = labels[0]  # a class of two micro-batches
        parts = [slice(*border) for border in zip(borders, borders[1:])]
        if is_announced:
            head.begin_update([labels[part] for part in parts])
        for part in parts:
            x = nd.array(samples[part])
            x.attach_grad()
            with autograd.record():
                loss = head(x, labels[part])
            loss.backward()
            found.append(loss.asnumpy())
            gradients.append(x.grad.asnumpy())
        stats.append(head.stats)
        trainer.step(borders[-1])
    return np.concatenate(found), np.concatenate(gradients), stats, head.class_weights(), head.step


def assert_same(one, other):
    for place in (0, 1, 3):
        scale = np.abs(other[place]).max()
        np.testing.assert_allclose(one[place] / scale, other[place] / scale, rtol=0, atol=1e-5)
    for a, b in zip(one[2], other[2]):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    assert one[4] == other[4] == 4


@pytest.mark.parametrize("preset", PRESETS)
def test_is_that_of_one_large_batch(preset):
    assert_same(train(preset, SIZES), train(preset, [12], is_announced=False))


@pytest.mark.parametrize(
    "preset", ["dsoftmax", "dsoftmax_b", "dsoftmax_k", "rand_arcface", "mv_softmax", "uniface"]
)
@pytest.mark.parametrize(
    "placement", [{"ctx": [mx.cpu(0), mx.cpu(1)]}, {"chunk": 7}, {"ctx": [mx.cpu(3)]}], ids=str
)
def test_in_every_placement(preset, placement):
    found = train(preset, SIZES, **placement)
    assert_same(found, train(preset, [12], is_announced=False))


@pytest.mark.parametrize("options", [{}, {"sample_rate": 0.3}], ids=str)
def test_several_centres_per_class(options):
    options = {"subcentres": 3, **options}
    large = train("cosface", [12], is_announced=False, **options)
    assert_same(train("cosface", SIZES, **options), large)


@pytest.mark.parametrize("preset", ["dsoftmax_k", "rand_softmax"])
@pytest.mark.parametrize("devices", [1, 2])
def test_from_host_memory(preset, devices):
    contexts = [mx.cpu(1 + i) for i in range(devices)]
    found = train(preset, SIZES, ctx=contexts, store="host")
    assert_same(found, train(preset, [12], is_announced=False))


@pytest.mark.parametrize("correction", [None, "logq"])
@pytest.mark.parametrize("preset", ["dsoftmax_k", "rand_softmax"])
def test_negatives_are_drawn_for_all_labels(preset, correction, monkeypatch):
    """Else a micro-batch's negatives would be labels of another one."""
    monkeypatch.setattr(negatives, "CACHED_CLASSES", 5)
    found = train(preset, SIZES, sample_rate=0.6, correction=correction)
    large = train(preset, [12], is_announced=False, sample_rate=0.6, correction=correction)
    assert_same(found, large)


def test_rows_that_leave_micro_batches_without_negatives():
    """One sample of twelve has negatives."""
    options = {"sample_rate": 1 / 12, "mean_over_rows": True}
    large = train("dsoftmax_b", [12], is_announced=False, **options)
    assert_same(train("dsoftmax_b", SIZES, **options), large)
    two = [mx.cpu(0), mx.cpu(1)]
    assert_same(train("dsoftmax_b", SIZES, ctx=two, **options), large)


@pytest.mark.parametrize("preset", PRESETS)
def test_an_announced_batch_has_the_same_bits(preset):
    """Its class rows only come earlier."""
    one, other = train(preset, [12]), train(preset, [12], is_announced=False)
    for a, b in zip(one, other):
        np.testing.assert_equal(a, b)


def test_a_large_batch_differs_from_the_batches_it_is_made_of():
    """The comparisons above would be empty if it did not."""
    head = train("dsoftmax_k", [12])
    parts = train("dsoftmax_k", [4, 8])
    assert_same(head, parts)
    rng = np.random.default_rng(3)
    samples, labels = rng.normal(size=(12, WIDTH)), rng.integers(0, CLASSES, 12)
    weights = []
    for announced in ([labels], [labels[:4]]):
        one = losses.create("dsoftmax_k", CLASSES, WIDTH, sample_rate=0.2, seed=5)
        one.initialize(mx.init.Normal(0.1))
        one.begin_update(announced)
        with autograd.record():
            loss = one(nd.array(samples[: len(announced[0])]), announced[0])
        loss.backward()
        one.trainer("sgd", {"learning_rate": 1}).step(1)
        weights.append(one.class_weights())
    assert not np.allclose(*weights, atol=1e-3)


@pytest.mark.parametrize("preset", RUNNING_MEANS)
def test_statistics_are_those_of_each_micro_batch(preset):
    """As BatchNorm's are; a running mean is no function of the large batch."""
    found, large = train(preset, SIZES), train(preset, [12], is_announced=False)
    size = np.abs(large[3]).max()
    np.testing.assert_allclose(found[3] / size, large[3] / size, atol=0.1)
    assert not np.allclose(found[3], large[3], atol=1e-7)


@pytest.fixture
def head():
    made = losses.create("dsoftmax_k", 20, WIDTH, sample_rate=0.3, seed=1)
    made.initialize(mx.init.Normal(0.1))
    return made


@pytest.fixture
def parts(rng):
    return [(nd.array(rng.normal(size=(3, WIDTH))), labels) for labels in ([1, 2, 3], [3, 4, 19])]


def backward(head, x, labels):
    with autograd.record():
        loss = head(x, labels)
    loss.backward()


def labels_of(parts):
    return [labels for _, labels in parts]


def test_evaluations_in_between_do_no_harm(head, parts):
    weights = []
    for evaluates in (False, True):
        head.initialize(mx.init.Normal(0.1), force_reinit=True)
        head.step = 0
        trainer = head.trainer("sgd", {"learning_rate": 1})
        head.begin_update(labels_of(parts))
        for part in parts:
            if evaluates:
                head(*parts[0])
            backward(head, *part)
        if evaluates:
            head(*parts[1])
        trainer.step(6)
        weights.append(head.class_weights())
    np.testing.assert_array_equal(*weights)


def test_all_micro_batches_in_one_backward_pass(head, parts):
    weights = []
    for together in (False, True):
        head.initialize(mx.init.Normal(0.1), force_reinit=True)
        head.step = 0
        head.begin_update(labels_of(parts))
        if together:
            with autograd.record():
                total = nd.add_n(*(head(*part).sum() for part in parts))
            total.backward()
        else:
            for part in parts:
                backward(head, *part)
        head.trainer("sgd", {"learning_rate": 1}).step(6)
        weights.append(head.class_weights())
    np.testing.assert_array_equal(*weights)


class TestMisuse:
    @pytest.fixture(autouse=True)
    def weights_stay(self, head):
        before = head.class_weights()
        yield
        np.testing.assert_array_equal(head.class_weights(), before)

    def test_a_step_before_the_last_micro_batch(self, head, parts):
        trainer = head.trainer("sgd", {"learning_rate": 0})
        head.begin_update(labels_of(parts))
        with pytest.raises(RuntimeError, match="no new gradient"):
            trainer.step(6)
        backward(head, *parts[0])
        with pytest.raises(RuntimeError, match="1 of the 2 micro-batches of this update did not"):
            trainer.step(6, ignore_stale_grad=True)
        backward(head, *parts[1])  # the update is not lost
        trainer.step(6)
        with pytest.raises(RuntimeError, match="no new gradient"):
            trainer.step(6)

    def test_a_micro_batch_without_backward(self, head, parts):
        head.begin_update(labels_of(parts))
        with autograd.record():
            loss = head(*parts[0])
        backward(head, *parts[1])
        trainer = head.trainer("sgd", {"learning_rate": 0})
        with pytest.raises(RuntimeError, match="1 of the 2 micro-batches"):
            trainer.step(6)
        loss.backward()
        trainer.step(6)

    def test_one_micro_batch_too_many(self, head, parts):
        head.begin_update(labels_of(parts))
        for part in parts:
            backward(head, *part)
        with pytest.raises(RuntimeError, match="before the next batch, finish it"):
            backward(head, *parts[0])
        head.drop_update()
        backward(head, *parts[0])

    def test_another_update_before_the_step(self, head, parts):
        """As who announces each micro-batch by itself does."""
        head.begin_update([parts[0][1]])
        backward(head, *parts[0])
        with pytest.raises(RuntimeError, match="before begin_update, finish it"):
            head.begin_update([parts[1][1]])
        head.drop_update()
        head.begin_update([parts[1][1]])

    def test_only_updates_are_dropped(self, head, parts):
        backward(head, *parts[0])
        head.drop_update()
        head.trainer("sgd", {"learning_rate": 0}).step(3)

    def test_other_labels_than_announced(self, head, parts):
        head.begin_update(labels_of(parts))
        with pytest.raises(ValueError, match="micro-batch 1 of 2 has other labels"):
            backward(head, *parts[1])

    @pytest.mark.parametrize("labels", [[], [[]], [3, 4], [[[1], [2]]]])
    def test_labels_that_are_no_list_of_batches(self, head, labels):
        with pytest.raises(ValueError, match="a list with the labels"):
            head.begin_update([np.array(part, np.int64) for part in labels])

    def test_a_label_out_of_range(self, head):
        with pytest.raises(ValueError, match="label of sample 1 is 20"):
            head.begin_update([[1, 2], [3, 20]])

    def test_a_batch_from_before_the_update(self, head, parts):
        with autograd.record():
            early = head(*parts[0])
        head.begin_update(labels_of(parts))
        early.backward()
        for part in parts:
            backward(head, *part)
        with pytest.raises(RuntimeError, match="2 batches went backward at once"):
            head.trainer("sgd").step(6)

    def test_new_weights_drop_the_update(self, head, parts):
        head.begin_update(labels_of(parts))
        backward(head, *parts[0])
        head.load_class_weights(head.class_weights())
        with pytest.raises(RuntimeError, match="no new gradient"):
            head.trainer("sgd").step(6)
        head.begin_update(labels_of(parts))

    def test_a_head_without_weights(self):
        with pytest.raises(RuntimeError, match="no weights"):
            losses.create("dsoftmax", 20, WIDTH).begin_update([[1, 2]])


def test_a_forest_needs_all_embeddings():
    head = losses.create("hf_softmax", 60, WIDTH, sample_rate=0.2)
    head.initialize()
    with pytest.raises(ValueError, match="depend on all of its embeddings"):
        head.begin_update([[1, 2], [3]])
