"""What becomes of the logits of the negatives, against NumPy in double precision."""

import math

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd

from dsoftmax.losses import operators
from dsoftmax.losses.kernels import Workspace
from dsoftmax.losses.pieces import Piece
from dsoftmax.losses.reductions import LogSumExp, SoftplusSum, join

BATCH, CLASSES, SCALE = 7, 41, 6.0


@pytest.fixture(params=["operators", "MXNet alone"])
def arithmetic(request, monkeypatch):
    if request.param == "MXNet alone":
        monkeypatch.setattr(operators, "_is_loaded", False)
        monkeypatch.setenv(operators.SWITCH, "0")
    elif not operators.load():
        pytest.skip("the operators are not built")


def make_pieces(rng, kind):
    """Return pieces of all degrees, with numbers for all samples and for each sample."""
    starts = nd.array(rng.uniform(-0.2, 0.2, BATCH))
    slope = nd.array(rng.uniform(0.5, 1.5, BATCH))
    everywhere = Piece.polynomial(-math.inf, 0.1, 0.5, -0.3, 0.7)
    emphasis = Piece.polynomial(starts, 0.3, 1.2)
    own_slope = Piece(0.4, (0.2, 0.0, 1.0), (0.4, 1.0))
    orthogonal = Piece(0.5, (0.1,), ())
    return {
        "none": [],
        "emphasis": [emphasis],
        "emphasis, filtered": [emphasis, orthogonal],
        "filter": [orthogonal],
        "floor": [Piece(-math.inf, (-0.09, 0.0, 1.0), (0.3, 1.0), floor=-0.3)],
        "floor above a start": [Piece(-0.2, (0.1, 1.0), (1.0,), floor=0.3)],
        "own slope": [own_slope],
        "everywhere": [everywhere],
        "everywhere, filtered": [everywhere, orthogonal],
        "per sample": [Piece.polynomial(starts, 0.0, slope, 1.0)],
        "three": [everywhere, Piece.polynomial(starts, 0.3, slope), own_slope],
    }[kind]


KINDS = [
    *("none", "emphasis", "emphasis, filtered", "filter", "floor", "floor above a start"),
    *("own slope", "everywhere", "everywhere, filtered", "per sample", "three"),
]


def shape(z, pieces):
    """Return h and its slope, (B, C), row by row and class by class."""

    def number(value, row):
        return float(value[row].asscalar()) if isinstance(value, nd.NDArray) else value

    values, slopes = z.copy(), np.ones_like(z)
    for (row, column), cosine in np.ndenumerate(z):
        for piece in pieces:
            if cosine > number(piece.start, row):
                at = max(cosine, piece.floor)
                values[row, column], slopes[row, column] = (
                    sum(number(factor, row) * at**power for power, factor in enumerate(factors))
                    for factors in (piece.value, piece.slope)
                )
    return values, slopes


def problem(rng, with_offset, normalize):
    """Return cosines, what the kernels are given for them, and which are negatives."""
    z = rng.uniform(-1, 1, (BATCH, CLASSES))
    inverse = rng.uniform(0.5, 2, (CLASSES, 1)) if normalize else np.ones((CLASSES, 1))
    offset = rng.uniform(0, 2, (1, CLASSES)) * with_offset
    own = rng.integers(-1, CLASSES, BATCH)
    is_negative = np.arange(CLASSES) != own[:, None]
    given = (
        nd.array(SCALE * z / inverse.T),
        nd.array(inverse) if normalize else None,
        own,
        nd.array(offset) if with_offset else None,
        nd.empty((BATCH, CLASSES)),
    )
    return z, inverse.T, offset, is_negative, given


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
class TestAgainstNumPy:
    def test_log_sum_exp(self, kind, with_offset, normalize, rng):
        pieces = make_pieces(rng, kind)
        z, inverse, offset, is_negative, given = problem(rng, with_offset, normalize)
        reduction = LogSumExp(*pieces).bind(SCALE, BATCH, mx.cpu(0))
        n, total, largest = (
            array.asnumpy() for array in reduction.reduce(*given, Workspace(mx.cpu(0)))
        )
        values, slopes = shape(z, pieces)
        exponentials = np.exp(SCALE * values + offset) * is_negative
        sums = exponentials.sum(axis=1)
        np.testing.assert_allclose(n, np.log(sums), rtol=1e-5)
        expected = exponentials / sums[:, None] * slopes * inverse
        np.testing.assert_allclose(given[-1].asnumpy(), expected, rtol=2e-5, atol=1e-6)
        self.check_figures(z, is_negative, total, largest, given[0])

    def test_softplus_sum(self, kind, with_offset, normalize, rng):
        pieces = make_pieces(rng, kind)
        z, inverse, offset, is_negative, given = problem(rng, with_offset, normalize)
        bias = rng.uniform(-4, 4, BATCH)
        reduction = SoftplusSum(nd.array(bias), *pieces).bind(SCALE, BATCH, mx.cpu(0))
        n, total, largest, mass = (
            array.asnumpy() for array in reduction.reduce(*given, Workspace(mx.cpu(0)))
        )
        values, slopes = shape(z, pieces)
        x, weight = SCALE * values - bias[:, None], np.exp(offset) * is_negative
        np.testing.assert_allclose(n, (weight * np.logaddexp(0, x)).sum(axis=1), rtol=1e-5)
        sigmoids = weight / (1 + np.exp(-x))
        np.testing.assert_allclose(mass, sigmoids.sum(axis=1), rtol=1e-5)
        expected = sigmoids * slopes * inverse
        np.testing.assert_allclose(given[-1].asnumpy(), expected, rtol=2e-5, atol=1e-6)
        self.check_figures(z, is_negative, total, largest, given[0])

    @staticmethod
    def check_figures(z, is_negative, total, largest, logits):
        """Sum and largest are those of the cosines, which remain as they are."""
        np.testing.assert_allclose(total, SCALE * (z * is_negative).sum(axis=1), atol=1e-4)
        negatives = np.where(is_negative, SCALE * z, -1e30)
        np.testing.assert_allclose(largest, negatives.max(axis=1), rtol=1e-6)
        np.testing.assert_allclose(logits.asnumpy(), negatives, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("centres", [2, 3, 4])
@pytest.mark.parametrize("make", [LogSumExp, lambda *pieces: SoftplusSum(nd.ones(BATCH), *pieces)])
def test_several_centres_are_those_that_are_nearest(make, centres, rng):
    """The sums are those of the nearest centres alone, which have the slopes."""
    reduction = make(*make_pieces(rng, "emphasis")).bind(SCALE, BATCH, mx.cpu(0))
    workspace = Workspace(mx.cpu(0))
    z, *_, given = problem(rng, True, True)
    own, offset, slopes = given[2:]
    expected = reduction.reduce(nd.array(SCALE * z), None, own, offset, slopes, workspace)
    # The others are farther away, each at a place of its own among the centres of its class.
    place = rng.integers(0, centres, z.shape)
    is_nearest = np.arange(centres) == place[:, :, None]
    cosines = np.where(is_nearest, z[:, :, None], z[:, :, None] - rng.uniform(0.1, 1))
    norms = rng.uniform(0.5, 2, (1, CLASSES, centres))
    logits, out = (
        (SCALE * cosines / norms).reshape(BATCH, -1),
        nd.empty((BATCH, z[0].size * centres)),
    )
    found = reduction.reduce(
        nd.array(logits), nd.array(norms.reshape(-1, 1)), own, offset, out, workspace, centres
    )
    for mine, wanted in zip(found, expected):
        np.testing.assert_allclose(mine.asnumpy(), wanted.asnumpy(), rtol=1e-4, atol=1e-5)
    wanted = slopes.asnumpy()[:, :, None] * norms * is_nearest
    np.testing.assert_allclose(out.asnumpy(), wanted.reshape(BATCH, -1), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("arithmetic")
def test_a_centre_that_is_no_number_shows(rng):
    logits = rng.normal(size=(2, 6))
    logits[1, 3] = math.nan
    reduction = LogSumExp().bind(1.0, 2, mx.cpu(0))
    workspace, out = Workspace(mx.cpu(0)), nd.empty((2, 6))
    n, *_ = reduction.reduce(nd.array(logits), None, np.full(2, -1), None, out, workspace, 2)
    np.testing.assert_array_equal(np.isnan(n.asnumpy()), [False, True])


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("scale", [0.01, 1, 30, 1000])
def test_softplus_far_from_zero_and_close_to_it(scale, rng):
    x = (rng.normal(size=(4, 500)) * scale).astype(np.float32)
    logits, out, own = nd.array(x), nd.empty(x.shape), np.full(4, -1)
    reduction = SoftplusSum(nd.zeros(4)).bind(1.0, 4, mx.cpu(0))
    n, _, _, mass = reduction.reduce(logits, None, own, None, out, Workspace(mx.cpu(0)))
    exact = x.astype(np.float64)
    np.testing.assert_allclose(n.asnumpy(), np.logaddexp(0, exact).sum(axis=1), rtol=1e-5)
    sigmoid = np.exp(-np.logaddexp(0, -exact))
    np.testing.assert_allclose(out.asnumpy(), sigmoid, rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(mass.asnumpy(), sigmoid.sum(axis=1), rtol=1e-5)


def test_a_filter_is_the_last_word():
    hard = Piece.polynomial(nd.array([-0.5, 0.5]), 0.25, 2.0)
    (first, last) = LogSumExp(hard).filtered(0.4).pieces
    assert first is hard
    assert (last.start, last.slope) == (0.4, ())
    np.testing.assert_allclose(last.value[0].asnumpy(), [0.25, 0])  # h(0) of each sample


def test_samples_of_a_batch_and_of_several(rng):
    one, other = (
        SoftplusSum(nd.array([b]), Piece.polynomial(nd.array(starts), 1.0)).of_samples(len(starts))
        for b, starts in ((1.0, [0.1, 0.2]), (2.0, [0.3]))
    )
    joined = join([one, other])
    assert joined.bias.asnumpy().tolist() == [1, 1, 2]
    taken = joined.take(np.array([0, 2]))
    assert taken.pieces[0].start.asnumpy() == pytest.approx([0.1, 0.3])
    assert taken.pieces[0].value == (1.0,)


def test_three_pieces_are_the_limit():
    piece = Piece(0.0, (1.0,), ())
    for make in (lambda: LogSumExp(*[piece] * 4), lambda: LogSumExp(*[piece] * 3).filtered(0.4)):
        with pytest.raises(ValueError, match="3 pieces at most, a filter included, not 4"):
            make()
