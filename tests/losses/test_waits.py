"""A training step waits for its device once, and what is not finite is noticed there."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd

from dsoftmax import losses
from dsoftmax.losses import operators
from tests.waits import counted_waits

CLASSES, WIDTH, BATCH = 60, 6, 12


@pytest.fixture(params=["operators", "MXNet alone"])
def arithmetic(request, monkeypatch):
    """Compute with the compiled operators, or as on a GPU without them."""
    if request.param == "MXNet alone":
        monkeypatch.setattr(operators, "_is_loaded", False)
        monkeypatch.setenv(operators.SWITCH, "0")
    elif not operators.load():
        pytest.skip("the operators are not built")


def make(preset, **options):
    if losses.resolve(preset).negatives != "all":
        options.setdefault("sample_rate", 0.3)
    if preset == "hf_softmax":
        options.update(trees=2, rebuild_every=1000)
    head = losses.create(preset, CLASSES, WIDTH, seed=5, **options)
    head.initialize(mx.init.Normal(0.1))
    return head, head.trainer("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3})


def batches(rng, parts):
    """Return the embeddings and labels of an update."""
    made = []
    for _ in range(parts):
        x = nd.array(rng.normal(size=(BATCH, WIDTH)))
        x.attach_grad()
        made.append((x, rng.integers(0, CLASSES, BATCH)))
    return made


def train(head, trainer, parts, is_announced):
    if is_announced:
        head.begin_update([labels for _, labels in parts])
    for x, labels in parts:
        with autograd.record():
            loss = head(x, labels)
        loss.backward()
    trainer.step(BATCH * len(parts))


def waits_of_steps(rng, head, trainer, parts=1, is_announced=False):
    """Return the waits of each of three steps; those of a first one don't count."""
    found = []
    for _ in range(4):
        made = batches(rng, parts)
        nd.waitall()
        with counted_waits() as waits:
            train(head, trainer, made, is_announced)
        found.append(waits)
    return found[1:]


OTHERWISE = [
    ("dsoftmax", {"chunk": 7}),
    ("arcface", {"subcentres": 2, "inter_filter": 0.4}),
    ("dsoftmax", {"d": "learned"}),
    ("dsoftmax", {"negatives": "batch"}),
    ("rand_arcface", {"chunk": 7}),
    ("dsoftmax_k", {"correction": "logq"}),
    ("dsoftmax_k", {"store": "host"}),
    ("dsoftmax_k", {"store": "host", "ctx": [mx.cpu(1)]}),  # as on a GPU
]


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize(
    ("preset", "options"),
    [*((name, {}) for name in losses.names() if name != "hf_softmax"), *OTHERWISE],
    ids=str,
)
def test_a_step_waits_once(preset, options, rng):
    for waits in waits_of_steps(rng, *make(preset, **options)):
        assert sum(waits.values()) == 1, waits


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize(("preset", "options"), [("curricularface", {}), *OTHERWISE], ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_an_announced_update_waits_once(preset, options, parts, rng):
    for waits in waits_of_steps(rng, *make(preset, **options), parts, is_announced=True):
        assert sum(waits.values()) == 1, waits


def test_two_bytes_need_the_operators(rng):
    """NumPy, which takes their place, waits for what it computes with."""
    if not operators.load():
        pytest.skip("the operators are not built")
    options = {"store": "host", "dtype": "float16", "ctx": [mx.cpu(1)]}
    for waits in waits_of_steps(rng, *make("dsoftmax_k", **options)):
        assert sum(waits.values()) == 1, waits


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_other_optimizers_wait_no_more(optimizer, rng):
    head, _ = make("dsoftmax_k")
    for waits in waits_of_steps(rng, head, head.trainer(optimizer, {"learning_rate": 0.1})):
        assert sum(waits.values()) == 1, waits


def test_a_forest_looks_at_the_embeddings_on_the_way(rng):
    for waits in waits_of_steps(rng, *make("hf_softmax")):
        assert sum(waits.values()) == 4, waits


def test_the_loss_is_read_once(rng):
    head, trainer = make("dsoftmax_k")
    with pytest.raises(RuntimeError, match="there is no loss yet"):
        head.read_loss()
    parts = batches(rng, 2)
    head.begin_update([labels for _, labels in parts])
    found = []
    for x, labels in parts:
        with autograd.record():
            loss = head(x, labels)
        loss.backward()
        found.append(loss.asnumpy())
        assert head.read_loss() == pytest.approx(np.concatenate(found).mean(), rel=1e-6)
    with counted_waits() as waits:
        trainer.step(2 * BATCH)
        assert head.read_loss() == pytest.approx(np.mean(found), rel=1e-6)
    assert not waits


@pytest.mark.parametrize("parts", [1, 3])
def test_all_figures_are_one_read(parts, rng):
    head, trainer = make("dsoftmax_b")
    train(head, trainer, batches(rng, parts), is_announced=True)
    with counted_waits() as waits:
        assert len(head.stats) == 9
    assert sum(waits.values()) == 1, waits


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("preset", losses.names())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e25])
def test_no_loss_hides_an_embedding_that_is_not_finite(preset, bad, rng):
    """The square of 1e25 overflows, which makes the length infinite and the cosines 0."""
    head, trainer = make(preset)
    train(head, trainer, batches(rng, 1), is_announced=False)
    before, state = head.class_weights(), head.criterion.read_state()
    ((x, labels),) = batches(rng, 1)
    x[4] = bad
    x[7, 2] = bad
    with pytest.raises(ValueError, match=r"2 of 12 embeddings hold NaN or infinite .* sample 4 is"):
        train(head, trainer, [(x, labels)], is_announced=False)
    np.testing.assert_array_equal(head.class_weights(), before)
    assert head.criterion.read_state() == state
    with pytest.raises(ValueError, match="2 of 12 embeddings"):
        head(x, labels)  # an evaluation, which is checked at once
    train(head, trainer, batches(rng, 1), is_announced=False)
    assert np.isfinite(head.class_weights()).all()


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("preset", losses.names())
def test_a_loss_that_is_not_finite_is_refused(preset, rng):
    head, trainer = make(preset)
    weights = head.class_weights()
    ((x, labels),) = batches(rng, 1)
    labels[:] = np.arange(BATCH)
    head.store.shards[0].weight[3] = np.nan
    with pytest.raises(ValueError, match=r"the loss is not finite for \d+ of 12 samples, sample"):
        train(head, trainer, [(x, labels)], is_announced=False)
    others = np.arange(CLASSES) != 3
    np.testing.assert_array_equal(head.class_weights()[others], weights[others])


def test_the_samples_of_an_update_are_counted_over_its_micro_batches(rng):
    head, trainer = make("dsoftmax_k")
    before = head.class_weights()
    parts = batches(rng, 2)
    parts[1][0][3] = np.nan
    with pytest.raises(ValueError, match=r"1 of 24 embeddings hold NaN .* sample 15 is the first"):
        train(head, trainer, parts, is_announced=True)
    np.testing.assert_array_equal(head.class_weights(), before)
    train(head, trainer, batches(rng, 2), is_announced=True)  # nothing of the last one is left
