"""Every preset against the naive float64 losses, loss and gradients."""

import mxnet as mx
import naive_losses
import numpy as np
import pytest
from mxnet import autograd

from dsoftmax import losses
from dsoftmax.losses import operators


@pytest.fixture(autouse=True, params=["our operators", "MXNet's"])
def implementation(request, monkeypatch):
    """Both ways to compute are held to the same."""
    if request.param == "MXNet's":
        monkeypatch.setattr(operators, "_is_loaded", False)
        monkeypatch.setenv(operators.SWITCH, "0")
    elif not operators.load():
        pytest.skip("the operators are not built: python tools/build_operators.py")


def options_of(preset):
    """Return options for a small problem: a rate at which something is drawn."""
    options = losses.resolve(preset).options
    chosen = {"sample_rate": 0.5 if preset == "dsoftmax_b" else 0.4, "trees": 3}
    return {name: value for name, value in chosen.items() if name in options}


@pytest.mark.parametrize("preset", losses.names())
def test_every_criterion_has_a_twin(preset):
    assert losses.resolve(preset).criterion.__name__ in naive_losses.TWINS


def run_head(head, x, labels):
    """Return losses, gradient to the embeddings and to the class weights."""
    embeddings = mx.nd.array(x)
    embeddings.attach_grad()
    before = head.class_weights()
    trainer = head.trainer("sgd", {"learning_rate": 1.0})
    with autograd.record():
        loss = head(embeddings, labels)
    loss.backward()
    trainer.step(1)
    return loss.asnumpy(), embeddings.grad.asnumpy(), before - head.class_weights()


def run_naive(name, draw, x, weights, labels, options):
    num_classes, batch = len(weights) // options["subcentres"], len(labels)
    offset = np.zeros(num_classes)
    negatives = set(range(num_classes))
    if draw.classes is not None:
        negatives = set(draw.classes)
        offset[draw.classes] = draw.correction
        if draw.labels_are_negatives:
            negatives |= set(labels)
    rows = range(batch) if draw.samples is None else draw.samples
    of_row = [
        sorted(negatives - {label}) if row in rows else [] for row, label in enumerate(labels)
    ]
    if options.get("mean_over_rows"):
        options = {**options, "inter_weight": batch / len(draw.samples)}
    return naive_losses.compute(name, x, weights, labels, of_row, offset, options)


def compare(preset, x, weights, labels, options=(), check_gradients=True, **shared):
    options = {**options_of(preset), **dict(options)}
    x, weights = np.asarray(x, np.float32), np.asarray(weights, np.float32)
    labels = np.asarray(labels)
    num_classes = len(weights) // options.get("subcentres", 1)
    head = losses.create(preset, num_classes, weights.shape[1], seed=3, **options, **shared)
    head.load_class_weights(weights)
    draw = head.sampler.draw(0, labels, mx.nd.array(x))
    spec = losses.resolve(preset, options)
    expected = run_naive(spec.criterion.__name__, draw, x, weights, labels, spec.options)
    found = run_head(head, x, labels)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    if check_gradients:
        for mine, naive in zip(found[1:], expected[1:]):
            size = max(1.0, np.abs(naive).max())
            np.testing.assert_allclose(mine / size, naive / size, atol=1e-4)
    assert all(np.isfinite(part).all() for part in found)
    return found


@pytest.fixture
def problem(rng):
    def make(batch=6, num_classes=17, width=8):
        x = 3 * rng.normal(size=(batch, width))
        weights = 0.1 * rng.normal(size=(num_classes, width))
        return x, weights, rng.integers(0, num_classes, batch)

    return make


@pytest.mark.parametrize("preset", losses.names())
@pytest.mark.parametrize(
    ("batch", "num_classes"), [(1, 2), (1, 40), (6, 17), (16, 5), (13, 100)], ids=str
)
def test_sizes(preset, problem, batch, num_classes):
    compare(preset, *problem(batch, num_classes))


@pytest.mark.parametrize("preset", sorted(set(losses.names()) - {"softmax"}))
@pytest.mark.parametrize("scale", [1, 16, 32, 64])
def test_scales(preset, problem, scale):
    compare(preset, *problem(), {"scale": scale})


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        *(("dsoftmax", {"d": d}) for d in (0.0, 0.5, 1.0, 1.2)),
        *(("cosface", {"m3": m3}) for m3 in (0.0, 0.4)),
        *(("arcface", {"m2": m2}) for m2 in (0.0, 0.3, 1.0)),
        *(("sphereface", {"m1": m1}) for m1 in (1, 1.5, 2, 3)),
        ("sphereface", {"m1": 4, "annealing": False}),
        ("combined", {"m1": 1.2, "m2": 0.4, "m3": 0.1}),
        ("combined", {"m1": 2, "m2": 0.0, "m3": 0.0}),
        ("adaface", {"m": 0.2}),
        *(("sphereface_r", {"m1": m1}) for m1 in (1, 2.5)),
        ("magface", {"l_a": 5, "u_a": 12, "regularizer": 300}),
        ("magface", {"l_a": 1, "u_a": 30, "l_m": 0.1, "u_m": 1.0}),
        *((preset, {"d": "learned", "m": 0.3}) for preset in ("dsoftmax", "dsoftmax_k")),
        ("dsoftmax_b", {"d": "learned", "sample_rate": 0.5, "mean_over_rows": True}),
        ("mv_softmax", {"m2": 0.5, "m3": 0.0, "t": 1.1}),
        ("mv_softmax", {"t": 1.0}),
        ("curricularface", {"m2": 0.2, "forget": 0.9}),
        ("circle", {"m": 0.4, "scale": 30}),
        *((preset, {"b": 3.0}) for preset in ("uniface", "sphereface2")),
        *(("sphereface2", {"t": t, "alpha": 0.4}) for t in (1, 2)),
        *(
            (preset, {"sample_rate": 0.4, "correction": "logq", "batch_classes": batch_classes})
            for preset in ("mv_softmax", "curricularface", "circle", "uniface", "sphereface2")
            for batch_classes in ("excluded", "added")
        ),
        *((preset, {"inter_filter": 0.3}) for preset in losses.names() if preset != "softmax"),
        ("circle", {"inter_filter": -0.5}),
        ("dsoftmax_b", {"mean_over_rows": True, "sample_rate": 0.3}),
        *(
            (preset, {"batch_classes": batch_classes, **correction})
            for preset in ("dsoftmax_k", "dsoftmax_arcface", "rand_softmax", "rand_arcface")
            for batch_classes in ("excluded", "counted", "added")
            for correction in ({"sample_rate": 0.4}, {"sample_rate": 0.4, "correction": "logq"})
        ),
        *(("hf_softmax", {"batch_classes": choice}) for choice in ("excluded", "added")),
        ("dsoftmax_b", {"sample_rate": 1}),
        ("dsoftmax_k", {"sample_rate": 1}),
        ("dsoftmax_k", {"correction": "logq"}),
        ("rand_softmax", {"correction": "logq"}),
        ("rand_arcface", {"correction": "logq", "sample_rate": 0.9}),
        ("rand_softmax", {"sample_rate": 0.01}),
    ],
    ids=str,
)
def test_options(preset, options, problem):
    compare(preset, *problem(), options)


WITH_CENTRES = [
    *((preset, {}) for preset in losses.names() if preset not in ("softmax", "hf_softmax")),
    ("softmax", {"scale": 0.5}),
    ("arcface", {"inter_filter": 0.3, "chunk": 5}),
    ("cosface", {"sample_rate": 0.4, "correction": "logq", "batch_classes": "added"}),
    ("uniface", {"sample_rate": 0.4, "correction": "logq", "chunk": 1}),
    ("dsoftmax", {"negatives": "batch"}),
    ("mv_softmax", {"ctx": [mx.cpu(0), mx.cpu(1), mx.cpu(2)]}),
]


@pytest.mark.parametrize(("preset", "options"), WITH_CENTRES, ids=str)
@pytest.mark.parametrize("centres", [2, 3])
def test_several_centres_per_class(preset, options, centres, rng):
    options = {**options, "subcentres": centres}
    shared = {name: options.pop(name) for name in ("chunk", "ctx") if name in options}
    x, weights = 3 * rng.normal(size=(7, 8)), 0.1 * rng.normal(size=(13 * centres, 8))
    compare(preset, x, weights, rng.integers(0, 13, 7), options, **shared)


@pytest.mark.parametrize("preset", losses.names())
@pytest.mark.parametrize("contexts", [2, 5])
def test_fewer_classes_than_devices(preset, problem, contexts):
    devices = [mx.cpu(i) for i in range(contexts)]
    compare(preset, *problem(4, 3), ctx=devices)
    compare(preset, *problem(4, 1), ctx=devices)


@pytest.mark.parametrize("preset", losses.names())
def test_all_samples_of_one_class(preset, problem):
    x, weights, labels = problem()
    compare(preset, x, weights, np.full_like(labels, 3))
    compare(preset, x, weights, np.full_like(labels, 3), ctx=[mx.cpu(0), mx.cpu(1), mx.cpu(2)])


# At θ = 0 and π the gradient of these to an embedding has no limit: it depends on the direction.
CUSPED = {
    *("arcface", "rand_arcface", "combined", "adaface", "sphereface", "curricularface", "magface")
}


@pytest.mark.parametrize("preset", losses.names())
@pytest.mark.parametrize("sign", [1, -1])
def test_exactly_on_and_opposite_to_the_class_weight(preset, problem, sign):
    x, weights, labels = problem()
    x = sign * 7 * weights[labels]
    compare(preset, x, weights, labels, check_gradients=preset not in CUSPED)


@pytest.mark.parametrize("preset", losses.names())
def test_zero_embedding_and_zero_weight(preset, problem):
    x, weights, labels = problem()
    x[2] = 0
    weights[labels[0]] = 0
    found = compare(preset, x, weights, labels)
    if preset != "softmax":
        assert (found[1][2] == 0).all()


def test_true_and_detached_gradient_of_arcface(problem):
    x, weights, labels = problem()
    true = compare("arcface", x, weights, labels)
    head = losses.create("arcface", *weights.shape, detach=True)
    head.load_class_weights(weights)
    detached = run_head(head, x.astype(np.float32), labels)
    np.testing.assert_allclose(detached[0], true[0], rtol=1e-6)
    assert not np.allclose(detached[1], true[1], rtol=0.01)
    # Detached is: the slope of a softmax with the margin's probabilities.
    z = [naive_losses.cosines(row, weights, True) for row in x]
    slopes = [64 * (1 - np.exp(-loss)) for loss in detached[0]]
    expected = np.zeros_like(x)
    for row, label in enumerate(labels):
        share = np.exp(64 * (z[row] - z[row].max()))
        share[label] = 0
        share /= share.sum()
        for k in range(len(weights)):
            slope = -slopes[row] if k == label else slopes[row] * share[k]
            expected[row] += slope * naive_losses.cosine_gradients(x[row], weights[k], True)[0]
    np.testing.assert_allclose(detached[1], expected, atol=1e-3 * np.abs(expected).max())


def test_the_naive_gradients_are_right(rng):
    """Against differences in every coordinate of embeddings and weights."""
    x, weights = rng.normal(size=(3, 4)), rng.normal(size=(5, 4))
    labels, offset = [1, 1, 4], np.zeros(5)
    negatives = [[k for k in range(5) if k != label] for label in labels]
    options = {"scale": 8.0, "d": 0.7, "normalize": True}

    def compute(x, weights):
        return naive_losses.compute("DSoftmax", x, weights, labels, negatives, offset, options)

    def total(x, weights):
        return compute(x, weights)[0].sum()

    _, to_x, to_weights = compute(x, weights)
    for array, gradient in ((x, to_x), (weights, to_weights)):
        for place in np.ndindex(array.shape):
            moved = [array.copy(), array.copy()]
            moved[0][place] += 1e-5
            moved[1][place] -= 1e-5
            pairs = [(m, weights) if array is x else (x, m) for m in moved]
            slope = (total(*pairs[0]) - total(*pairs[1])) / 2e-5
            assert slope == pytest.approx(gradient[place], abs=1e-5)
