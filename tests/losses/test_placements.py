"""Where weights live, and in which pieces n is computed, changes nothing."""

import os
import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd

from dsoftmax import losses
from dsoftmax.losses.stores import base
from dsoftmax.losses.stores.local import DeviceStore, LocalStore

RATES = {"dsoftmax_b": 0.5, "dsoftmax_k": 0.3, "rand_softmax": 0.3, "rand_arcface": 0.3}
SAMPLED = ["dsoftmax_k", "rand_softmax", "rand_arcface", "hf_softmax"]


def options_of(preset):
    if preset == "hf_softmax":
        return {"sample_rate": 0.3, "trees": 5, "rebuild_every": 4}
    if preset == "circle":  # at a scale of 256, steps are so large that they magnify rounding
        return {"scale": 64}
    return {"sample_rate": RATES[preset]} if preset in RATES else {}


def train(preset, steps=10, num_classes=23, width=6, batch=9, optimizer="sgd", **options):
    """Train a linear network and a head for some steps; return all that came out."""
    random = np.random.default_rng(7)
    options = {"seed": 5, **options_of(preset), **options}
    head = losses.create(preset, num_classes, width, **options)
    head.load_class_weights(random.normal(0, 0.1, head.store.shape).astype(np.float32))
    parameters = {"learning_rate": 0.05}
    if optimizer == "sgd":
        parameters.update(momentum=0.9, wd=5e-4)
    trainer = head.trainer(optimizer, parameters)
    network = nd.array(random.normal(size=(5, width)))
    network.attach_grad()
    values = []
    for _ in range(steps):
        x = nd.array(random.normal(size=(batch, 5)))
        labels = random.integers(0, num_classes, batch)
        with autograd.record():
            loss = head(nd.dot(x, network), labels)
        loss.backward()
        trainer.step(batch)
        network -= 0.05 * network.grad / batch
        values.append(loss.asnumpy())
    return np.array(values), network.asnumpy(), head.class_weights()


def assert_same(found, expected):
    for one, other in zip(found, expected):
        scale = max(1.0, np.abs(other).max())
        np.testing.assert_allclose(one / scale, other / scale, atol=1e-5)


@pytest.mark.parametrize("preset", losses.names())
@pytest.mark.parametrize("devices", [2, 3, 5])
def test_devices(preset, devices):
    assert_same(train(preset, ctx=[mx.cpu(i) for i in range(devices)]), train(preset))


@pytest.mark.parametrize("preset", losses.names())
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunks(preset, chunk):
    assert_same(train(preset, chunk=chunk), train(preset))


@pytest.mark.parametrize("preset", SAMPLED)
@pytest.mark.parametrize("devices", [1, 2])
def test_host(preset, devices):
    # The computing devices are not the host's cpu(0), so that rows really travel.
    contexts = [mx.cpu(1 + i) for i in range(devices)]
    assert_same(train(preset, ctx=contexts, store="host"), train(preset))


SHAPED = [
    ("arcface", {"inter_filter": 0.3}),
    ("dsoftmax_b", {"inter_filter": 0.3}),
    *((name, {"sample_rate": 0.3}) for name in ("mv_softmax", "curricularface", "circle")),
    *((name, {"sample_rate": 0.3, "correction": "logq"}) for name in ("uniface", "sphereface2")),
    ("uniface", {"negatives": "rows", "sample_rate": 0.5, "mean_over_rows": True}),
    ("curricularface", {"negatives": "rows", "sample_rate": 0.5}),
    ("dsoftmax", {"negatives": "batch"}),
    ("arcface", {"subcentres": 3}),
    ("curricularface", {"subcentres": 2, "sample_rate": 0.3, "correction": "logq"}),
    ("dsoftmax", {"d": "learned", "sample_rate": 0.3}),
    ("arcface", {"negatives": "mixed", "sample_rate": 0.4, "nearest": 2, "trees": 5}),
    ("cosface", {"sample_rate": [(0, 0.3), (4, 1.0)]}),
    ("circle", {"negatives": "forest", "sample_rate": 0.3, "trees": 5, "inter_filter": 0.3}),
]


@pytest.mark.parametrize(("preset", "options"), SHAPED, ids=str)
def test_with_every_choice_of_negatives(preset, options):
    expected = train(preset, **options)
    contexts = [mx.cpu(1 + i) for i in range(2)]
    chosen = {**options_of(preset), **options}
    store = "device" if losses.resolve(preset, chosen).sampled_share is None else "host"
    assert_same(train(preset, ctx=contexts, store=store, chunk=4, **options), expected)


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
@pytest.mark.parametrize("preset", ["dsoftmax", "dsoftmax_k", "uniface"])
def test_other_optimizers(preset, optimizer):
    expected = train(preset, optimizer=optimizer)
    assert_same(train(preset, optimizer=optimizer, ctx=[mx.cpu(i) for i in range(4)]), expected)


def test_all_at_once():
    found = train("rand_arcface", ctx=[mx.cpu(1), mx.cpu(2)], store="host", chunk=2)
    assert_same(found, train("rand_arcface"))


def test_another_seed_makes_a_difference():
    """The comparisons above would be empty if nothing depended on what is drawn."""
    one, same, other = (train("dsoftmax_k", steps=3, seed=seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(one[2], same[2])
    assert not np.allclose(one[2], other[2], atol=1e-4)


@pytest.mark.parametrize("preset", ["dsoftmax_k", "rand_softmax", "hf_softmax"])
@pytest.mark.parametrize("store", ["device", "host"])
def test_rows_not_in_use_are_not_touched(preset, store):
    head = losses.create(preset, 200, 6, seed=1, sample_rate=0.1, store=store)
    head.initialize(mx.init.Normal(0.1))
    trainer = head.trainer("sgd", {"learning_rate": 0.5, "momentum": 0.9, "wd": 0.1})
    for step in range(3):
        before = head.class_weights()
        x = nd.random.normal(shape=(4, 6))
        labels = np.array([3, 3, 150, 199])
        draw = head.sampler.draw(step, labels, x)
        with autograd.record():
            loss = head(x, labels)
        loss.backward()
        trainer.step(4)
        moved = np.flatnonzero((head.class_weights() != before).any(axis=1))
        in_use = np.union1d(draw.classes, labels)
        np.testing.assert_array_equal(moved, in_use)
        assert head.stats["rows_touched"] == len(in_use)


TWO_CONTEXTS = """
import mxnet as mx, numpy as np
from mxnet import autograd, nd
from dsoftmax import losses
head = losses.create("dsoftmax", 3000, 128, ctx=[mx.cpu(0), mx.cpu(1)], seed=1)
head.initialize()
trainer = head.trainer("sgd", {"momentum": 0.9})
x = nd.random.normal(shape=(64, 128))
x.attach_grad()
for step in range(100):
    with autograd.record():
        loss = head(x, np.arange(64))
    loss.backward()
    trainer.step(64)
nd.waitall()
"""


def test_contexts_of_a_cpu_with_several_threads_each():
    """MXNet's BLAS hangs if two multiply at once; it did so within a few of these steps."""
    command = [sys.executable, "-W", "ignore", "-c", TWO_CONTEXTS]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run(command, env=environment, check=True, timeout=120)


def test_chunks_never_hold_batch_times_classes(monkeypatch):
    sizes = []

    def spy(operator):
        def call(*args, **kwargs):
            result = operator(*args, **kwargs)
            sizes.append(result.size)
            return result

        return call

    for name in ("dot", "FullyConnected"):
        monkeypatch.setattr(nd, name, spy(getattr(nd, name)))
    batch, num_classes, width = 64, 1000, 4
    head = losses.create("dsoftmax", num_classes, width, chunk=50)
    head.initialize()
    x = nd.random.normal(shape=(batch, width))
    x.attach_grad()
    with autograd.record():
        loss = head(x, np.arange(batch))
    loss.backward()
    head.trainer("sgd").step(batch)
    assert len(sizes) > 60
    assert max(sizes) <= max(batch * 50, num_classes * width)


def test_the_split_is_exact():
    head = losses.create("dsoftmax", 10, 4, ctx=[mx.cpu(i) for i in range(4)])
    assert [(shard.start, shard.stop) for shard in head.store.shards] == [
        (0, 2),
        (2, 5),
        (5, 7),
        (7, 10),
    ]
    assert [shard.weight.context for shard in head.store.shards] == [mx.cpu(i) for i in range(4)]


@pytest.mark.parametrize("preset", ["dsoftmax", "rand_softmax", "hf_softmax"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_device_with_more_classes_than_an_array_holds(preset, devices, monkeypatch):
    contexts = [mx.cpu(i) for i in range(devices)]
    expected = train(preset, ctx=contexts)
    description = repr(losses.create(preset, 23, 6, ctx=contexts))
    monkeypatch.setattr(LocalStore, "largest_shard", 6 * 4 + 5)
    assert_same(train(preset, ctx=contexts), expected)
    head = losses.create(preset, 23, 6, ctx=contexts)
    assert repr(head) == description
    shards = head.store.shards
    assert max(len(shard) for shard in shards) == 4
    assert len(shards) == 6
    assert (shards[0].start, shards[-1].stop) == (0, 23)
    assert [shard.stop for shard in shards[:-1]] == [shard.start for shard in shards[1:]]
    assert [shard.device for shard in shards] == sorted(contexts * (6 // devices), key=str)


def test_class_weights_load_on_any_number_of_devices(rng):
    weights = rng.normal(size=(11, 4)).astype(np.float32)
    for devices in (1, 2, 5, 12):
        head = losses.create("dsoftmax", 11, 4, ctx=[mx.cpu(i) for i in range(devices)])
        head.load_class_weights(weights)
        np.testing.assert_array_equal(head.class_weights(), weights)
        head.load_class_weights(nd.array(weights))
        np.testing.assert_array_equal(head.class_weights(), weights)
    with pytest.raises(ValueError, match=r"shape \(11, 4\), not \(4, 11\)"):
        head.load_class_weights(weights.T)
    with pytest.raises(ValueError, match="NaN"):
        head.load_class_weights(np.full((11, 4), np.nan))


def test_initialization_depends_on_the_seed_alone():
    def weights(devices, seed):
        head = losses.create("dsoftmax", 11, 4, ctx=[mx.cpu(i) for i in range(devices)], seed=seed)
        head.initialize(mx.init.Normal(0.01))
        return head.class_weights()

    np.testing.assert_array_equal(weights(1, 1), weights(3, 1))
    assert not np.allclose(weights(1, 1), weights(1, 2))
    assert weights(1, 1).std() == pytest.approx(0.01, rel=0.5)


@pytest.mark.parametrize(
    ("with_operators", "way", "expected"),
    [(True, "onednn", False), (False, "onednn", True), (True, "dot", True)],
)
def test_contexts_take_turns_where_they_must(with_operators, way, expected, monkeypatch):
    monkeypatch.setattr(base, "way", lambda _: way)
    monkeypatch.setattr(base.operators, "serve", lambda _: with_operators)
    store = DeviceStore(10, 4, [mx.cpu(0), mx.cpu(1)])
    assert store.one_at_a_time == expected
    assert not DeviceStore(10, 4, [mx.cpu(0)]).one_at_a_time
