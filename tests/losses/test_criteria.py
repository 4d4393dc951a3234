import json
import math

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.test_utils import check_numeric_gradient

from dsoftmax import losses
from dsoftmax.losses.criteria import BatchContext, Criterion

SPECS = [losses.resolve(name) for name in losses.names()]
# One per criterion, by the name of its class, and some with other options.
ALL = {
    **{spec.criterion.__name__: spec.criterion(scale=32) for spec in SPECS},
    "detached ArcFace": losses.ArcFace(scale=32, detach=True),
    "SphereFace 1.5": losses.SphereFace(scale=32, m1=1.5),
    "Combined 1.2": losses.Combined(scale=32, m1=1.2),
    "D-Softmax, learned d": losses.DSoftmax(scale=32, d="learned"),
}


for made in ALL.values():
    made.prepare(negatives=1000)


@pytest.fixture(params=ALL)
def criterion(request):
    made = ALL[request.param]
    made.hybridize(False)
    return made


@pytest.fixture
def batch(rng):
    z_y = nd.array(rng.uniform(-0.95, 0.95, 12))
    n = nd.array(rng.uniform(-10, 40, 12))
    return z_y, n, BatchContext(step=50, norm=nd.array(rng.uniform(5, 40, 12)), inter_weight=1.7)


def run(criterion, z_y, n, *arguments):
    z_y.attach_grad()
    n.attach_grad()
    with autograd.record():
        loss = criterion(z_y, n, *arguments)
    loss.backward()
    return loss.asnumpy(), z_y.grad.asnumpy(), n.grad.asnumpy()


def test_hybridized_is_the_same(criterion, batch):
    z_y, n, facts = batch
    arguments = criterion.arguments(facts)
    plain = run(criterion, z_y, n, None, *arguments)
    criterion.hybridize()
    for one, other in zip(run(criterion, z_y, n, None, *arguments), plain):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_sample_weight(criterion, batch, rng):
    z_y, n, facts = batch
    arguments = criterion.arguments(facts)
    weight = nd.array(rng.uniform(0, 2, 12))
    loss = criterion(z_y, n, None, *arguments)
    assert loss.shape == (12,)
    weighted = criterion(z_y, n, weight, *arguments)
    np.testing.assert_allclose(weighted.asnumpy(), (loss * weight).asnumpy(), rtol=1e-5)


# The gradient of the others is not that of their value, on purpose.
DETACHED = {"detached ArcFace", "SphereFaceR", "Circle", "DSoftmaxSoftmax", "DSoftmaxArcFace"}


@pytest.mark.parametrize("name", sorted(set(ALL) - DETACHED))
def test_numeric_gradients(name, batch):
    criterion = ALL[name]
    _, _, facts = batch
    names = ["z_y", "n"] + [f"argument{i}" for i in range(len(criterion.arguments(facts)))]
    symbol = criterion(mx.sym.var("z_y"), mx.sym.var("n"), None, *map(mx.sym.var, names[2:]))
    arguments = [argument[:5] for argument in criterion.arguments(facts)]
    check_numeric_gradient(
        symbol,
        # Away from the borders where φ has a kink, and where softplus is curved but not 0.
        dict(
            zip(
                names,
                [nd.array([0.3, 0.1, -0.1, 0.4, 0.55]), nd.array([9, 1, -8, 12, 5]), *arguments],
            )
        ),
        grad_nodes=["z_y", "n"],
        numeric_eps=1e-3,
        rtol=0.02,
        atol=5e-2,
    )


def test_the_inter_part_of_hybrids_sends_no_gradient_to_z_y(batch):
    z_y, n, _ = batch
    expected = run(losses.DSoftmax(scale=32), z_y, n)[1]
    for hybrid in (losses.DSoftmaxSoftmax(scale=32), losses.DSoftmaxArcFace(scale=32)):
        np.testing.assert_allclose(run(hybrid, z_y, n)[1], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("criterion", "point"),
    [
        (losses.Softmax(32), lambda a: a),
        (losses.CosFace(32, m3=0.35), lambda a: a + 0.35),
        (losses.ArcFace(32, m2=0.5), lambda a: math.cos(math.acos(a) - 0.5)),
        (losses.SphereFace(32, m1=1.5), lambda a: math.cos(math.acos(a) / 1.5)),
        (losses.Combined(32, m2=0.3, m3=0.2), lambda a: math.cos(math.acos(a + 0.2) - 0.3)),
        (losses.SphereFaceR(32, m1=1.5), lambda a: math.cos(math.acos(a) / 1.5)),
        (losses.MVSoftmax(32, m2=0.2, m3=0.1), lambda a: math.cos(math.acos(a + 0.1) - 0.2)),
        (losses.CurricularFace(32, m2=0.5), lambda a: math.cos(math.acos(a) - 0.5)),
        (losses.MagFace(32, regularizer=0), lambda a: math.cos(math.acos(a) - 0.45)),
        (losses.Circle(32, m=0.9), lambda a: 1 - math.sqrt(0.81 - a)),
        (losses.UniFace(32, m=0.3, b=5), lambda a: 0.3 + 5 / 32),
        (losses.SphereFace2(32, m=0.3, t=2, b=5), lambda a: 2 * math.sqrt(0.65 - 5 / 64) - 1),
        (losses.DSoftmax(32, d=0.9), lambda a: 0.9),
        (losses.DSoftmax(32, d="learned", m=0.3), lambda a: 0.3 + math.log(1000) / 32),
    ],
    ids=lambda value: repr(value) if isinstance(value, Criterion) else "",
)
@pytest.mark.parametrize("log_m", [4.0, 9.0, 14.0])
def test_termination_points(criterion, point, log_m):
    """Eq. d = log M / s and its siblings, measured where the two straight parts meet.

    There the argument of softplus is 0, so the loss in z_y has come down to log 2 above its end.
    """
    z_y = nd.array(np.linspace(-0.5, 1, 30001))
    criterion.prepare(negatives=1000)
    arguments = criterion.arguments(BatchContext(0, nd.ones(z_y.shape)))
    loss, _ = criterion.parts(nd, z_y, nd.full(z_y.shape, log_m), *arguments)
    end = getattr(criterion, "alpha", 1) * math.log(2)
    measured = z_y.asnumpy()[np.abs(loss.asnumpy() - end).argmin()]
    assert measured == pytest.approx(point(log_m / 32), abs=2e-4)
    assert criterion.termination_point(log_m) == pytest.approx(measured, abs=2e-4)


@pytest.mark.parametrize("name", losses.names())
def test_every_loss_can_be_described_before_its_first_batch(name):
    criterion = losses.resolve(name).make_criterion()
    assert criterion.inter_floor(0.0) is None or criterion.dissected
    assert isinstance(criterion.termination_point(5.0), float)


def test_termination_point_beyond_the_ends():
    assert losses.Softmax(32).termination_point(100) == 1
    assert losses.Softmax(32).termination_point(-100) == -1


def test_targets_fall_with_the_angle():
    theta = np.linspace(0.01, np.pi - 0.01, 500)
    cosine = nd.array(np.cos(theta))
    for name, made in ALL.items():
        if hasattr(made, "target"):
            arguments = made.arguments(BatchContext(10, nd.ones((500,))))
            target = made.target(nd, cosine, *arguments).asnumpy()
            assert (np.diff(target) < 1e-6).all(), name


def test_psi_is_not_just_a_multiplied_angle():
    """At m1 θ = 3π/2 the cosine is 0 again, ψ is -2."""
    target = losses.SphereFace(32, m1=4).target(nd, nd.array([math.cos(3 * math.pi / 8)]))
    assert target.asscalar() == pytest.approx(-2, abs=1e-5)


def test_annealing_falls_and_is_an_argument():
    criterion = losses.SphereFace(32)
    criterion.hybridize()
    assert [round(criterion.annealed(step), 3) for step in (0, 10, 10**6)] == [1000, 454.545, 5]
    z_y, n = nd.array([0.2]), nd.array([5.0])
    first, last = (
        criterion(z_y, n, None, *criterion.arguments(BatchContext(step, nd.ones((1,))))).asscalar()
        for step in (0, 10**6)
    )
    assert last > first  # a hybridized graph must not have kept λ


def test_adaface_follows_the_lengths(rng):
    criterion = losses.AdaFace(64)
    for _ in range(2000):
        criterion.arguments(BatchContext(0, nd.array(rng.normal(15, 3, 64))))
    assert criterion.read_state()["mean"] == pytest.approx(15, abs=0.5)
    assert criterion.read_state()["deviation"] == pytest.approx(3, abs=0.5)
    (quality,) = criterion.arguments(BatchContext(0, nd.array([15.0, 100, 0.1])))
    assert quality.asnumpy() == pytest.approx([0, 1, -1], abs=0.1)


def test_evaluation_leaves_adaface_as_it_is():
    head = losses.create("adaface", 10, 4)
    head.initialize()
    before = head.criterion.read_state()
    head(nd.ones((2, 4)), np.array([0, 1]))
    assert head.criterion.read_state() == before
    with autograd.record():
        head(nd.ones((2, 4)), np.array([0, 1]))
    assert head.criterion.read_state() != before


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_embeddings_that_are_not_finite_leave_adaface_as_it_is(bad):
    """They are noticed later, when the trainer refuses their batch."""
    criterion = losses.AdaFace(64)
    criterion.arguments(BatchContext(0, nd.array([15.0, 17.0])))
    before = criterion.read_state()
    criterion.arguments(BatchContext(0, nd.array([15.0, bad])))
    assert criterion.read_state() == before


def test_the_state_of_adaface_is_exact_in_double_precision(rng):
    """So that a resumed run, which reads it from JSON, has the same bits."""
    criterion, resumed = losses.AdaFace(64), losses.AdaFace(64)
    expected = dict(criterion.state)
    for _ in range(5):
        lengths = rng.uniform(5, 50, 8).astype(np.float32)
        resumed.state.update(json.loads(json.dumps(criterion.read_state())))
        one, other = (
            made.arguments(BatchContext(0, nd.array(lengths)))[0].asnumpy()
            for made in (criterion, resumed)
        )
        np.testing.assert_array_equal(one, other)
        mean = nd.array(lengths).mean().asscalar()
        expected["mean"] += 0.01 * (mean - expected["mean"])
        assert criterion.read_state()["mean"] == resumed.read_state()["mean"] == expected["mean"]


def test_safe_where_others_overflow():
    """e^{s (d + 1)} is infinite at s = 64; -1e30 stands for no negatives."""
    z_y, n = nd.array([-1.0, 1.0, 0.0]), nd.array([64.0, -1e30, -1e30])
    for made in ALL.values():
        arguments = made.arguments(BatchContext(0, nd.ones((3,))))
        values = run(made, z_y, n, None, *arguments)
        assert all(np.isfinite(value).all() for value in values), made


def test_reprs_tell_their_story():
    assert repr(losses.DSoftmax(32, d=0.9)) == "DSoftmax(scale=32, d=0.9)"
    assert repr(losses.ArcFace(64, detach=True)) == "ArcFace(scale=64, m2=0.5, detach=True)"
    assert "m1=4, annealing=True" in repr(losses.SphereFace(32))
    assert repr(losses.NegativeLogSumExp(32)) == "NegativeLogSumExp(of cosines, scale=32)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.Softmax(0), "scale must be a positive number, not 0"),
        (lambda: losses.Softmax(math.nan), "scale must be"),
        (lambda: losses.ArcFace(64, m2=2), r"m2 must lie from 0 to 1\.571, not 2"),
        (lambda: losses.SphereFace(64, m1=0.5), "m1 must lie from 1 to 16"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class TestNegativeLogSumExp:
    @pytest.mark.parametrize("normalize", [True, False])
    @pytest.mark.parametrize("hybridize", [True, False])
    def test_value_and_gradient_are_the_heads(self, rng, normalize, hybridize):
        weights = rng.normal(size=(9, 5))
        x, labels = nd.array(rng.normal(size=(6, 5))), np.array([0, 8, 3, 3, 1, 0])
        block = losses.NegativeLogSumExp(4, normalize)
        if hybridize:
            block.hybridize()
        weight = nd.array(weights)
        for array in (x, weight):
            array.attach_grad()
        with autograd.record():
            n = block(x, weight, nd.array(labels))
            total = nd.Activation(n, act_type="softrelu")
        total.backward()
        expected = [x.grad.copy(), weight.grad.copy()]
        # A head whose intra part has no gradient: d is far below every cosine.
        head = losses.create("dsoftmax", 9, 5, scale=4, d=-99, normalize=normalize)
        head.load_class_weights(weights)
        with autograd.record():
            loss = head(x, labels)
        loss.backward()
        head.trainer("sgd", {"learning_rate": 1}).step(1)
        # A sum of large products may be near 0, so that its rounding is no share of it.
        of_head = head._updates.latest.figures().negatives.n.asnumpy()
        np.testing.assert_allclose(of_head, n.asnumpy(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(x.grad.asnumpy(), expected[0].asnumpy(), atol=1e-4)
        moved = weights - head.class_weights()
        np.testing.assert_allclose(moved, expected[1].asnumpy(), atol=1e-4)

    def test_without_negatives_or_own_class(self):
        block = losses.NegativeLogSumExp(8)
        x, weight = nd.array([[1.0, 0]]), nd.array([[1.0, 0]])
        assert block(x, weight, nd.array([0])).asscalar() < -1e29
        assert block(x, weight, nd.array([-1])).asscalar() == pytest.approx(8)
