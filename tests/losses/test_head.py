import copy
import math
import pickle

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd

from dsoftmax import losses
from dsoftmax.losses import negatives, operators
from dsoftmax.losses.trainer import REFUSED_OPTIMIZERS
from dsoftmax.losses.update import StaleGradientError


@pytest.fixture
def head():
    made = losses.create("dsoftmax", 20, 6, seed=1)
    made.initialize(mx.init.Normal(0.1))
    return made


@pytest.fixture
def batch(rng):
    return nd.array(rng.normal(size=(5, 6))), nd.array([1, 2, 3, 3, 19], dtype="int32")


def backward(head, x, labels, sample_weight=None):
    with autograd.record():
        loss = head(x, labels, sample_weight)
    loss.backward()
    return loss


def test_the_contract_as_it_is_written():
    head = losses.create(
        "dsoftmax_k",
        num_classes=757,
        embedding_size=16,
        ctx=[mx.cpu(0), mx.cpu(1)],
        scale=32,
        d=0.9,
        sample_rate=1 / 64,
        seed=1,
    )
    head.initialize(mx.init.Normal(0.01))
    trainer = head.trainer("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 5e-4})
    embeddings, labels = nd.random.normal(shape=(8, 16)), nd.arange(8, dtype="int32")
    with autograd.record():
        loss = head(embeddings, labels)
    loss.backward()
    trainer.step(8)
    assert loss.shape == (8,)
    assert loss.context == embeddings.context
    assert head.class_weights().shape == (757, 16)
    assert {"intra", "inter", "positive_cosine", "negative_cosine", "max_negative_cosine"} < set(
        head.stats
    )
    assert head.stats["rows_touched"] == 12 + 8
    assert {"dsoftmax", "dsoftmax_b", "dsoftmax_k", "hf_softmax"} <= set(losses.names())


@pytest.mark.parametrize("kind", [np.array, list, lambda y: nd.array(y, dtype="int64")])
def test_labels_of_any_integer_kind(head, batch, kind):
    expected = head(*batch).asnumpy()
    np.testing.assert_array_equal(head(batch[0], kind([1, 2, 3, 3, 19])).asnumpy(), expected)


def test_loss_is_on_the_embeddings_context(batch):
    head = losses.create("dsoftmax", 20, 6, ctx=[mx.cpu(1), mx.cpu(2)])
    head.initialize()
    x = batch[0].as_in_context(mx.cpu(3))
    x.attach_grad()
    loss = backward(head, x, batch[1])
    head.trainer().step(5)
    assert loss.context == mx.cpu(3)
    assert x.grad.context == mx.cpu(3)


def test_sample_weight_scales_loss_and_gradients(head, batch):
    x, labels = batch
    x.attach_grad()
    weight = nd.array([0, 1, 2, 0, 0.5])
    plain = backward(head, x, labels).asnumpy()
    gradient = x.grad.asnumpy()
    weighted = backward(head, x, labels, weight).asnumpy()
    np.testing.assert_allclose(weighted, plain * weight.asnumpy(), rtol=1e-5)
    expected = gradient * weight.asnumpy()[:, None]
    np.testing.assert_allclose(x.grad.asnumpy(), expected, rtol=1e-4, atol=1e-6)
    # A class none of whose samples counts is a negative alone.
    before = head.class_weights()
    backward(head, x, labels, nd.zeros((5,)))
    head.trainer("sgd", {"learning_rate": 1}).step(1)
    np.testing.assert_array_equal(head.class_weights(), before)


def test_gradients_of_any_function_of_the_loss(head, batch):
    """Not only loss.backward(): the mean, or a head gradient."""
    x, labels = batch
    x.attach_grad()
    backward(head, x, labels)
    full = x.grad.asnumpy()
    with autograd.record():
        mean = head(x, labels).mean()
    mean.backward()
    np.testing.assert_allclose(x.grad.asnumpy(), full / 5, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("preset", ["dsoftmax", "dsoftmax_k"])
def test_two_batches_before_one_backward(preset, rng):
    """Steps use memory again, but not while a batch still needs it."""
    first, second = (nd.array(rng.normal(size=(5, 6))) for _ in range(2))
    labels = np.arange(5)

    def gradients(together):
        head = losses.create(preset, 20, 6, seed=1)
        head.initialize(mx.init.Normal(0.1))
        for x in (first, second):
            x.attach_grad()
        if together:
            with autograd.record():
                total = head(first, labels) + head(second, labels)
            total.backward()
        else:
            for x in (first, second):
                backward(head, x, labels)
        return first.grad.asnumpy(), second.grad.asnumpy()

    for one, other in zip(gradients(True), gradients(False)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset", ["dsoftmax", "arcface", "softmax", "dsoftmax_b"])
@pytest.mark.parametrize("optimizer", ["sgd", "nag", "adam", "rmsprop"])
def test_many_blocks_are_one_update(preset, optimizer, rng, monkeypatch):
    """Without chunks, too, the classes are taken in blocks; neither value nor update shows it."""
    x, labels = nd.array(rng.normal(size=(5, 6))), np.array([3, 3, 19, 7, 8])
    # Adaptive steps divide by the size of a gradient, and so magnify the rounding of small ones.
    damped = {"epsilon": 0.01} if optimizer in ("adam", "rmsprop") else {}

    def weights_after(steps, block):
        monkeypatch.setattr(negatives, "CACHED_CLASSES", block)
        head = losses.create(preset, 20, 6, seed=1, scale=4)
        head.initialize(mx.init.Normal(0.1))
        trainer = head.trainer(optimizer, {"learning_rate": 0.1, "wd": 0.1, **damped})
        for _ in range(steps):
            values = backward(head, x, labels).asnumpy()
            trainer.step(5)
        return values, head.class_weights()

    for whole, blocks in zip(weights_after(4, 100), weights_after(4, 7)):
        np.testing.assert_allclose(blocks, whole, rtol=1e-4, atol=1e-4)


def test_new_weights_drop_the_gradients_of_the_old(head, batch):
    backward(head, *batch)
    head.load_class_weights(np.ones((20, 6)))
    with pytest.raises(StaleGradientError):
        head.trainer().step(5)
    np.testing.assert_array_equal(head.class_weights(), 1)


def test_memory_is_used_again(head, batch):
    trainer = head.trainer("sgd")
    backward(head, *batch)
    workspaces = head._updates._pending._workspaces
    for finish in (lambda: trainer.step(5), lambda: None):  # an update, or the next batch
        finish()
        backward(head, *batch)
        assert head._updates._pending._workspaces is workspaces


def test_an_evaluation_leaves_the_memory_of_a_batch_alone(rng):
    """Between backward and step: the update is the one without the evaluation."""

    def weights(evaluates):
        head = losses.create("dsoftmax", 20, 6, seed=1)
        head.initialize(mx.init.Normal(0.1))
        backward(head, x, labels)
        if evaluates:
            head(2 * x[::-1], labels)
        head.trainer("sgd", {"learning_rate": 1}).step(5)
        return head.class_weights()

    x, labels = nd.array(rng.normal(size=(5, 6))), np.arange(5)
    np.testing.assert_array_equal(weights(True), weights(False))


def test_a_batch_without_a_step_is_superseded(head, batch):
    """Backward, no step, an evaluation, and training goes on."""
    backward(head, *batch)
    head(*batch)
    backward(head, *batch)
    head.trainer("sgd").step(5)


def test_a_batch_without_backward_is_superseded(head, batch):
    """As one that is skipped; many of them leave nothing behind."""
    for _ in range(20):
        with autograd.record():
            head(*batch)
    assert len(head._updates._superseded) < 10
    backward(head, *batch)
    head.trainer("sgd").step(5)


def test_an_update_is_of_the_last_batch(head, batch):
    with autograd.record():
        first = head(*batch)
        head(*batch)
    first.backward()
    with pytest.raises(RuntimeError, match="went backward is not the last one"):
        head.trainer("sgd").step(5)


def test_a_second_backward_counts_once(head, batch):
    """It overwrites the gradient of the first, as with a gluon.Parameter."""
    trainer = head.trainer("sgd")
    with autograd.record():
        loss = head(*batch)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    trainer.step(5)
    loss.backward()
    with pytest.raises(RuntimeError, match="no new gradient"):
        trainer.step(5)


@pytest.mark.parametrize("contexts", [1, 2])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
def test_a_used_head_can_be_copied(copied, contexts, batch):
    head = losses.create("dsoftmax", 20, 6, ctx=[mx.cpu(i) for i in range(contexts)], seed=1)
    head.initialize(mx.init.Normal(0.1))
    backward(head, *batch)
    other = copied(head)
    assert head._updates._pending is not None  # it loses nothing by it
    head.trainer("sgd").step(5)
    assert other.step == head.step
    assert (other.class_weights() != head.class_weights()).any()
    losses_of = []
    for each in (head, other):
        each.load_class_weights(np.ones((20, 6)))
        losses_of.append(backward(each, *batch).asnumpy())
        each.trainer("sgd", {"learning_rate": 1}).step(5)
    np.testing.assert_array_equal(*losses_of)
    np.testing.assert_array_equal(head.class_weights(), other.class_weights())


class TestParameterFiles:
    def test_hold_the_class_weights(self, head, tmp_path):
        head.save_parameters(tmp_path / "head.params")
        other = losses.create("arcface", 20, 6, ctx=[mx.cpu(0), mx.cpu(1)])
        other.load_parameters(tmp_path / "head.params")
        np.testing.assert_array_equal(other.class_weights(), head.class_weights())

    def test_of_something_else_are_refused(self, head, tmp_path):
        dense = gluon.nn.Dense(3, in_units=2)
        dense.initialize()
        dense.save_parameters(str(tmp_path / "dense.params"))
        with pytest.raises(ValueError, match=r"dense.params: not the parameters of a head"):
            head.load_parameters(tmp_path / "dense.params")
        losses_of_21 = losses.create("dsoftmax", 21, 6)
        losses_of_21.initialize()
        losses_of_21.save_parameters(tmp_path / "more.params")
        with pytest.raises(ValueError, match=r"shape \(20, 6\), not \(21, 6\)"):
            head.load_parameters(tmp_path / "more.params")

    def test_of_a_block_around_it_would_lack_them(self, head, tmp_path):
        class Net(gluon.Block):
            def __init__(self):
                super().__init__()
                self.body = gluon.nn.Dense(6, in_units=4)
                self.head = head

        net = Net()
        net.body.initialize()
        net.body.save_parameters(str(tmp_path / "net.params"))
        for method in (net.save_parameters, net.load_parameters):
            with pytest.raises(ValueError, match="on the head and on the network separately"):
                method(str(tmp_path / "net.params"))
        assert len(list(net.collect_params())) == 2  # which a gluon.Trainer asks for


@pytest.mark.parametrize("preset", losses.names())
def test_ten_steps_lower_the_loss(preset, rng):
    options = {"sample_rate": 0.5} if losses.resolve(preset).negatives != "all" else {}
    head = losses.create(preset, 20, 8, seed=1, **options)
    head.initialize(mx.init.Normal(0.1))
    trainer = head.trainer("sgd", {"learning_rate": 0.05, "momentum": 0.9})
    x = nd.array(rng.normal(size=(16, 8)))
    labels = rng.integers(0, 20, 16)
    values = []
    for _ in range(20):
        head.step = 0  # the same negatives each time, so that losses can be compared
        values.append(backward(head, x, labels).mean().asscalar())
        trainer.step(16)
    assert values[-1] < 0.9 * values[0]


def test_stats_against_a_plain_loop(rng):
    weights, x = rng.normal(size=(20, 6)), rng.normal(size=(5, 6))
    labels = np.array([1, 2, 3, 3, 19])
    x[:3] += 2 * weights[labels[:3]]  # some are right, some wrong
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    cosines = unit @ (weights / np.linalg.norm(weights, axis=1, keepdims=True)).T
    for preset, options in (
        ("dsoftmax", {}),
        ("dsoftmax", {"chunk": 3}),
        ("dsoftmax_b", {"sample_rate": 0.4}),
        ("dsoftmax_k", {"sample_rate": 0.3, "ctx": [mx.cpu(0), mx.cpu(1)]}),
        ("rand_softmax", {"sample_rate": 0.4, "correction": "logq"}),
    ):
        head = losses.create(preset, 20, 6, seed=1, **options)
        head.load_class_weights(weights)
        draw = head.sampler.draw(0, labels)
        loss = head(nd.array(x), labels)
        negatives, is_right = [], []
        for row in range(5) if draw.samples is None else draw.samples:
            classes = set(range(20)) if draw.classes is None else set(draw.classes)
            if draw.labels_are_negatives:
                classes |= set(labels)
            negatives.append([cosines[row, k] for k in classes - {labels[row]}])
            is_right.append(cosines[row, labels[row]] > max(negatives[-1]))
        stats = head.stats
        every = np.concatenate(negatives)
        assert stats["accuracy"] == pytest.approx(np.mean(is_right))
        assert stats["positive_cosine"] == pytest.approx(
            np.mean([cosines[row, label] for row, label in enumerate(labels)]), abs=1e-5
        )
        assert stats["negative_cosine"] == pytest.approx(every.mean(), abs=1e-5)
        assert stats["max_negative_cosine"] == pytest.approx(every.max(), abs=1e-5)
        total = stats["intra"] + stats["inter"]
        assert total == pytest.approx(loss.mean().asscalar(), rel=1e-5)


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("dsoftmax", {}),
        ("dsoftmax", {"negatives": "classes", "sample_rate": 0.25, "correction": "logq"}),
        ("dsoftmax_k", {"sample_rate": 0.25}),
        ("dsoftmax_b", {"sample_rate": 0.25}),
        ("dsoftmax_b", {"sample_rate": 0.25, "mean_over_rows": True}),
        ("dsoftmax", {"inter_filter": 0.5}),
        ("uniface", {}),
        ("uniface", {"sample_rate": 0.25, "correction": "logq"}),
        ("sphereface2", {"t": 2}),
    ],
)
def test_the_floor_is_the_inter_loss_of_orthogonal_classes(preset, options):
    head = losses.create(preset, 12, 16, **options)
    head.load_class_weights(np.eye(12, 16))
    embeddings = nd.array(np.eye(16)[12:])  # at a right angle to every class
    head(embeddings, np.arange(4))
    stats = head.stats
    assert stats["inter"] == pytest.approx(stats["inter_floor"], rel=1e-5)


@pytest.mark.parametrize("preset", ["dsoftmax_softmax", "dsoftmax_arcface", "arcface", "softmax"])
def test_no_floor_where_the_inter_loss_depends_on_the_target(preset, batch):
    head = losses.create(preset, 20, 6)
    head.initialize(mx.init.Normal(0.1))
    head(*batch)
    assert "inter_floor" not in head.stats


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        *((name, {}) for name in losses.names()),
        ("dsoftmax", {"chunk": 3}),
        ("dsoftmax_k", {"correction": "logq", "ctx": [mx.cpu(0), mx.cpu(1)]}),
    ],
)
@pytest.mark.parametrize("with_operators", [False, True])
def test_a_class_weight_that_is_no_number_shows_in_the_loss(
    preset, options, with_operators, rng, monkeypatch
):
    if with_operators and not operators.load():
        pytest.skip("the operators are not built here")
    monkeypatch.setattr(operators, "_is_loaded", with_operators)
    monkeypatch.setenv(operators.SWITCH, str(int(with_operators)))
    if losses.resolve(preset).negatives != "all":
        options = {"sample_rate": 1.0, **options}
    head = losses.create(preset, 20, 6, **options)
    head.initialize(mx.init.Normal(0.1))
    x, labels = nd.array(rng.normal(size=(5, 6))), np.arange(5)
    assert np.isfinite(head(x, labels).asnumpy()).all()
    good = head.class_weights()
    for row in (2, 17):  # the own class of a sample, a negative of all
        for bad in (np.nan, np.inf, -np.inf):
            head.load_class_weights(good)
            shard = next(shard for shard in head.store.shards if shard.owned(np.array([row]))[0])
            shard.weight[row - shard.start, 3] = bad
            assert not np.isfinite(head(x, labels).mean().asscalar())


def test_a_criterion_may_train_the_length_of_the_embeddings(rng):
    class LongEnough(losses.Criterion):
        def arguments(self, batch):
            return [batch.norm]

        def parts(self, F, z_y, n, norm):
            return norm, F.zeros_like(norm)

    made = losses.create("nsoftmax", 20, 6)
    head = losses.Head(LongEnough(scale=1), made.sampler, made.store)
    head.initialize()
    x = nd.array(rng.normal(size=(5, 6)))
    x[3] = 0
    x.attach_grad()
    backward(head, x, np.arange(5))
    expected = x.asnumpy() / np.maximum(np.linalg.norm(x.asnumpy(), axis=1, keepdims=True), 1e-9)
    np.testing.assert_allclose(x.grad.asnumpy(), expected, rtol=1e-5)


def test_who_has_no_negatives_is_right(rng):
    head = losses.create("dsoftmax", 1, 6)
    head.initialize(mx.init.Normal(0.1))
    head(nd.array(rng.normal(size=(5, 6))), np.zeros(5, int))
    assert head.stats["accuracy"] == 1


def test_repr_tells_its_story():
    head = losses.create("dsoftmax_k", 757, 16, ctx=[mx.cpu(1)], store="host", chunk=5)
    assert repr(head) == (
        "Head(16 -> 757: DSoftmax(scale=32, d=0.9) against 12 of 757 classes at random, the "
        "batch's classes excluded, 5 classes at a time; on cpu(1) from cpu(0))"
    )


class TestErrors:
    """Each its own sentence, and no weight has changed."""

    @pytest.fixture(autouse=True)
    def weights_stay(self, head):
        before = head.class_weights()
        yield
        np.testing.assert_array_equal(head.class_weights(), before)

    @pytest.mark.parametrize("label", [-1, 20, 10**6])
    def test_label_out_of_range(self, head, batch, label):
        with pytest.raises(ValueError, match=f"sample 4 is {label}, but there are 20 classes"):
            head(batch[0], np.array([1, 2, 3, 3, label]))

    @pytest.mark.parametrize("kind", ["float32", "float16", "float64"])
    def test_float_labels(self, head, batch, kind):
        with pytest.raises(TypeError, match=f"labels must be integers, not {kind}"):
            head(batch[0], batch[1].astype(kind))

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_embeddings_that_are_not_finite(self, head, batch, bad):
        batch[0][2, 3] = bad
        with pytest.raises(ValueError, match=r"1 of 5 embeddings hold NaN .*sample 2"):
            head(*batch)

    def test_wrong_width_and_batch(self, head, batch):
        with pytest.raises(ValueError, match=r"shape \(5, 6\).*not \(5, 7\)"):
            head(nd.ones((5, 7)), batch[1])
        with pytest.raises(ValueError, match=r"shape \(4, 6\).*not \(5, 6\)"):
            head(batch[0], batch[1][:4])
        with pytest.raises(ValueError, match=r"shape \(B,\)"):
            head(batch[0], np.zeros((5, 1), int))

    @pytest.mark.parametrize("which", ["embeddings", "labels", "both"])
    def test_a_list_with_an_array_per_device(self, head, batch, which):
        embeddings, labels = batch[:2]
        if which != "labels":
            embeddings = [embeddings[:2], embeddings[2:]]
        if which != "embeddings":
            labels = [nd.array(part, dtype="int32") for part in ([1, 2], [3, 3, 19])]
        with pytest.raises(TypeError, match=r"one array .* nd\.concat\(\*\(e\.as_in_context\("):
            head(embeddings, labels)

    def test_a_list_of_numbers_is_one_array(self, head, batch):
        embeddings, labels = batch[:2]
        expected = head(embeddings, labels).asnumpy()
        found = head(embeddings, list(np.array([1, 2, 3, 3, 19]))).asnumpy()
        np.testing.assert_array_equal(found, expected)

    def test_half_precision(self, head, batch):
        with pytest.raises(TypeError, match="must be float32, not float16"):
            head(batch[0].astype("float16"), batch[1])

    def test_uninitialized(self, batch):
        with pytest.raises(RuntimeError, match="call initialize or load_class_weights"):
            losses.create("dsoftmax", 20, 6)(*batch)

    def test_initialized_twice(self, head):
        with pytest.raises(ValueError, match="initialized already"):
            head.initialize()

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"name": "dsoftmx"}, ValueError, "no loss 'dsoftmx', did you mean .*dsoftmax"),
            ({"d": 1, "m2": 1}, TypeError, "no option m2, .* Legal are d, .*, and ctx"),
            ({"sample_rate": 0}, ValueError, r"sample_rate must lie in \(0, 1\], not 0"),
            ({"sample_rate": 1.5}, ValueError, r"sample_rate must lie in \(0, 1\], not 1.5"),
            ({"negatives": "some"}, ValueError, "negatives must be one of all, classes, rows"),
            ({"num_classes": 0}, ValueError, "num_classes must be a whole number, 1 or more"),
            ({"chunk": 0}, ValueError, "chunk must be a whole number"),
            ({"store": "disk"}, ValueError, "store must be one of device, host"),
            ({"dtype": "float8"}, ValueError, "Legal are float32, float16, bfloat16"),
            ({"dtype": "float16"}, ValueError, "which store='host' can"),
            ({"store": "server", "dtype": "bfloat16"}, ValueError, "which store='host' can"),
            ({"store": "host"}, ValueError, "choose a loss with sampled classes"),
            ({"sample_rate": 0.5, "correction": "x"}, ValueError, "None or 'logq', not 'x'"),
            ({"num_classes": 1 << 30, "embedding_size": 512}, ValueError, "need 2199.0 GB in"),
        ],
    )
    def test_bad_options(self, options, error, message):
        options = {"name": "dsoftmax", "num_classes": 20, "embedding_size": 6, **options}
        with pytest.raises(error, match=message):
            losses.create(**options)


class TestTrainer:
    def test_is_mxnets_own_sgd(self, rng):
        """Plain softmax against Gluon's Dense, SoftmaxCELoss and Trainer."""
        weights = rng.normal(size=(7, 4)).astype(np.float32)
        head = losses.create("softmax", 7, 4)
        head.load_class_weights(weights)
        parameters = {"learning_rate": 0.3, "momentum": 0.9, "wd": 0.01}
        trainer = head.trainer("sgd", dict(parameters))
        dense = gluon.nn.Dense(7, use_bias=False, in_units=4)
        dense.initialize()
        dense.weight.set_data(nd.array(weights))
        their_trainer = gluon.Trainer(dense.collect_params(), "sgd", dict(parameters))
        criterion = gluon.loss.SoftmaxCELoss()
        for step in range(6):
            x, labels = nd.array(rng.normal(size=(5, 4))), nd.array(rng.integers(0, 7, 5))
            loss = backward(head, x, labels.astype("int32"))
            with autograd.record():
                expected = criterion(dense(x), labels)
            expected.backward()
            np.testing.assert_allclose(loss.asnumpy(), expected.asnumpy(), atol=1e-5)
            if step == 3:
                trainer.set_learning_rate(0.05)
                their_trainer.set_learning_rate(0.05)
            trainer.step(5)
            their_trainer.step(5)
        np.testing.assert_allclose(
            head.class_weights(), dense.weight.data().asnumpy(), rtol=1e-4, atol=1e-5
        )
        assert trainer.learning_rate == 0.05

    def test_lazy_momentum_waits_for_its_row(self):
        """Two steps with a row, two without it, one with it: as if those two had not been."""

        def run(rows_of_steps):
            head = losses.create("softmax", 6, 2, sample_rate=0.01, seed=1)
            head.load_class_weights(np.arange(12).reshape(6, 2) / 10 + 0.1)
            trainer = head.trainer("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1})
            for labels in rows_of_steps:
                backward(head, nd.array([[1.0, 2], [2, 1]]), np.array(labels))
                trainer.step(2)
            return head.class_weights()

        with_pause = run([(0, 1), (0, 1), (2, 3), (4, 5), (0, 1)])
        without = run([(0, 1), (0, 1), (0, 1)])
        np.testing.assert_allclose(with_pause[:2], without[:2], rtol=1e-6)

    @pytest.mark.parametrize(
        ("preset", "optimizer"),
        [
            ("dsoftmax", "sgd"),
            ("dsoftmax_k", "sgd"),
            ("dsoftmax_k", "adam"),
            ("adaface", "sgd"),
            ("curricularface", "sgd"),
            ("uniface", "sgd"),
            ("sphereface2", "adam"),
            ("sub-centres", "sgd"),
            ("hf_softmax", "sgd"),
        ],
    )
    def test_states_go_on_on_another_number_of_devices(self, tmp_path, rng, preset, optimizer):
        batches = [(nd.array(rng.normal(size=(6, 4))), rng.integers(0, 30, 6)) for _ in range(6)]

        def make(devices):
            options = {
                "dsoftmax_k": {"sample_rate": 0.3},
                "hf_softmax": {"sample_rate": 0.3, "trees": 1},
                "sub-centres": {"sample_rate": 0.3, "subcentres": 2},
                # At 64, a cosine that rounding puts on the other side of the threshold shows.
                "curricularface": {"scale": 16},
            }.get(preset, {})
            contexts = [mx.cpu(i) for i in range(devices)]
            name = "cosface" if preset == "sub-centres" else preset
            head = losses.create(name, 30, 4, ctx=contexts, seed=2, **options)
            head.initialize(mx.init.Normal(0.1))
            # Adam divides small gradients by their size: rounding must not be among those.
            more = {"momentum": 0.9} if optimizer == "sgd" else {"epsilon": 1.0}
            return head, head.trainer(optimizer, {"learning_rate": 0.1, **more})

        def go_on(head, trainer, some):
            for x, labels in some:
                backward(head, x, labels)
                trainer.step(6)

        head, trainer = make(2)
        go_on(head, trainer, batches)
        first, first_trainer = make(3)
        go_on(first, first_trainer, batches[:3])
        first_trainer.set_learning_rate(0.1)
        first_trainer.save_states(tmp_path / "states")
        second, second_trainer = make(5)
        second.load_class_weights(first.class_weights())
        second_trainer.load_states(tmp_path / "states")
        assert second.step == 3
        if preset == "hf_softmax":
            assert second.sampler.built_at == 0
        go_on(second, second_trainer, batches[3:])
        expected = head.class_weights()
        size = np.abs(expected).max()
        np.testing.assert_allclose(second.class_weights() / size, expected / size, atol=1e-5)
        assert [file.name for file in tmp_path.iterdir()] == ["states"]
        state, expected = second.criterion.read_state(), head.criterion.read_state()
        assert state == pytest.approx(expected, rel=1e-5, abs=1e-5)

    def test_states_that_do_not_fit(self, head, tmp_path):
        momentum = head.trainer("sgd", {"momentum": 0.9})
        momentum.save_states(tmp_path / "states")
        with pytest.raises(ValueError, match="SGD's, not Adam's"):
            head.trainer("adam").load_states(tmp_path / "states")
        with pytest.raises(ValueError, match="not that of 20 classes"):
            head.trainer("sgd").load_states(tmp_path / "states")
        nd.save(str(tmp_path / "other"), [nd.ones((1,))])
        with pytest.raises(ValueError, match="its parameters have no names"):
            momentum.load_states(tmp_path / "other")
        nd.save(str(tmp_path / "other"), {"some": nd.ones((1,))})
        with pytest.raises(ValueError, match="not the state of a head's trainer"):
            momentum.load_states(tmp_path / "other")

    def test_a_step_needs_a_new_gradient(self, head, batch):
        trainer = head.trainer("sgd")
        with pytest.raises(RuntimeError, match="no new gradient since the last step"):
            trainer.step(5)
        head(*batch)
        with pytest.raises(RuntimeError, match="no new gradient since the last step"):
            trainer.step(5)
        with autograd.record():
            loss = head(*batch)
        with pytest.raises(RuntimeError, match="no new gradient since the last step"):
            trainer.step(5)
        head(*batch)  # an evaluation in between does no harm
        loss.backward()
        head(*batch)
        trainer.step(5)
        with pytest.raises(RuntimeError, match="no new gradient since the last step"):
            trainer.step(5)
        trainer.step(5, ignore_stale_grad=True)

    def test_no_gradient_is_lost_silently(self, head, batch):
        trainer = head.trainer("sgd")
        before = head.class_weights()
        with autograd.record():
            total = head(*batch) + head(*batch)
        total.backward()
        with pytest.raises(RuntimeError, match="2 batches went backward at once"):
            trainer.step(5, ignore_stale_grad=True)  # which is another matter
        np.testing.assert_array_equal(head.class_weights(), before)
        backward(head, *batch)
        trainer.step(5)

    def test_the_last_backward_counts(self, batch):
        """As with a gluon.Parameter, whose gradient the next backward pass overwrites."""
        x, labels = batch

        def weights(before_the_step):
            head = losses.create("dsoftmax", 20, 6, seed=1)
            head.initialize(mx.init.Normal(0.1))
            for scale in before_the_step:
                backward(head, scale * x, labels)
            head.trainer("sgd", {"learning_rate": 1}).step(5)
            return head.class_weights()

        np.testing.assert_array_equal(weights([-1, 3, 1]), weights([1]))

    @pytest.mark.parametrize("name", sorted(mx.optimizer.Optimizer.opt_registry))
    def test_untouched_rows_are_untouched(self, name, rng):
        """With sampled classes, by every optimizer of MXNet; or it is refused."""
        head = losses.create("dsoftmax_k", 1000, 4, sample_rate=0.01, seed=1)
        head.initialize(mx.init.Normal(0.1))
        if name in REFUSED_OPTIMIZERS:
            with pytest.raises(ValueError, match=f"{name} can't update class weights"):
                head.trainer(name)
            return
        trainer = head.trainer(name, {"wd": 0.01, "learning_rate": 0.1})
        touched = np.zeros(1000, bool)
        for step in range(3):
            before = head.class_weights()
            labels = rng.integers(0, 1000, 5)
            now = np.zeros(1000, bool)
            now[labels] = now[head.sampler.draw(step, labels).classes] = True
            backward(head, nd.array(rng.normal(size=(5, 4))), labels)
            trainer.step(5)
            changed = (head.class_weights() != before).any(axis=1)
            assert not changed[~now].any()
            assert changed[now].mean() > 0.5  # ftrl may leave a row at 0
            touched |= now
        for name in trainer._state_names():  # momenta of the others have not begun
            assert not head.store.read(name)[~touched].any()

    @pytest.mark.parametrize(
        "name",
        sorted(set(mx.optimizer.Optimizer.opt_registry) - set(REFUSED_OPTIMIZERS)),
    )
    def test_an_update_of_all_rows_is_the_dense_one(self, name, rng):
        """Rate 1 samples every class: the same numbers as without sampling, over several steps."""
        x, labels = nd.array(rng.normal(size=(6, 4))), np.arange(6)

        def weights(**options):
            head = losses.create("nsoftmax", 30, 4, scale=8, seed=1, **options)
            head.initialize(mx.init.Normal(0.1))
            trainer = head.trainer(name, {"wd": 0.01, "learning_rate": 0.01})
            for _ in range(3):
                backward(head, x, labels)
                trainer.step(6)
            return head.class_weights()

        # Adaptive steps magnify the rounding of small gradients.
        np.testing.assert_allclose(weights(sample_rate=1.0), weights(), rtol=1e-3, atol=1e-3)

    def test_an_optimizer_of_ones_own(self, head, batch):
        trainer = head.trainer(mx.optimizer.SGD(learning_rate=0.5))
        before = head.class_weights()
        backward(head, *batch)
        trainer.step(5)
        assert (head.class_weights() != before).any()
        with pytest.raises(ValueError, match="must be empty"):
            head.trainer(mx.optimizer.SGD(), {"wd": 1})


class TestLearnedNumbers:
    """b of UniFace and SphereFace2, which the trainer updates."""

    @pytest.mark.parametrize("preset", ["uniface", "sphereface2"])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"ctx": [mx.cpu(0), mx.cpu(1), mx.cpu(2)], "chunk": 3},
            {"sample_rate": 0.4, "correction": "logq"},
            {"negatives": "rows", "sample_rate": 0.5, "mean_over_rows": True},
        ],
        ids=str,
    )
    def test_their_gradient_is_the_slope_of_the_loss(self, preset, options, rng):
        x, labels = nd.array(rng.normal(size=(8, 6))), rng.integers(0, 20, 8)
        weights = rng.normal(size=(20, 6)).astype(np.float32)

        def run(b):
            head = losses.create(preset, 20, 6, scale=8, b=b, seed=1, **options)
            head.load_class_weights(weights)
            loss = backward(head, x, labels)
            return head, float(loss.sum().asscalar())

        b = 1.5 if preset == "uniface" else -1.5
        head, loss = run(b)
        head.trainer("sgd", {"learning_rate": 1.0}).step(1)
        slope = (run(b + 0.01)[1] - run(b - 0.01)[1]) / 0.02
        rounding = 2 * np.spacing(np.float32(loss)) / 0.02
        expected = pytest.approx(slope, rel=2e-3, abs=rounding)
        assert b - head.criterion.read_state()["b"] == expected

    def test_momentum(self, rng):
        criterion = losses.UniFace(64, b=1.0)
        for gradient in (2.0, 3.0):
            criterion.learn({"b": nd.array([gradient])}, lr=0.1, momentum=0.5)
        speeds = [-0.2, 0.5 * -0.2 - 0.3]
        assert criterion.read_state() == pytest.approx({"b": 1 + sum(speeds), "b_momentum": -0.4})

    def test_evaluations_and_refused_batches_leave_them_as_they_are(self, rng):
        head = losses.create("uniface", 20, 6)
        head.initialize(mx.init.Normal(0.1))
        x, labels = nd.array(rng.normal(size=(8, 6))), rng.integers(0, 20, 8)
        head(x, labels)
        assert head.criterion.read_state() == {"b": pytest.approx(math.log(190))}
        trainer = head.trainer("sgd", {"learning_rate": 0.1})
        backward(head, x, labels)  # superseded by the next batch, which is refused
        x[2] = np.nan
        backward(head, x, labels)
        with pytest.raises(ValueError, match="NaN"):
            trainer.step(8)
        assert head.criterion.read_state() == {"b": pytest.approx(math.log(190))}
