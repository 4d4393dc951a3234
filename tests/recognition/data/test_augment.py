import cv2
import mxnet as mx
import numpy as np
import pytest

from dsoftmax.recognition.data import augment
from dsoftmax.recognition.data.augment import DRAWS, Augmentation, cut_out, jitter_color, recompress


@pytest.fixture
def image(rng):
    coarse = rng.integers(60, 180, (8, 8, 3), np.uint8)
    return cv2.resize(coarse, (112, 112), interpolation=cv2.INTER_LINEAR)


def draws(**chosen):
    values = [0.9] * DRAWS  # nothing that has a probability of ½ happens
    for name, value in chosen.items():
        values[getattr(augment, name)] = value
    return values


def test_mirror(image):
    np.testing.assert_array_equal(Augmentation()(image, draws(MIRROR=0.1)), image[:, ::-1])
    np.testing.assert_array_equal(Augmentation()(image, draws(MIRROR=0.6)), image)
    np.testing.assert_array_equal(Augmentation(mirror=False)(image, draws(MIRROR=0.1)), image)


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
)
def test_jitter_is_mxnets_in_every_order(image, rng, order, monkeypatch):
    """MXNet applies brightness, contrast and saturation one after the other, in random order."""
    factors = rng.uniform(-0.125, 0.125, 3)
    jitters = [
        mx.image.BrightnessJitterAug(0.125),
        mx.image.ContrastJitterAug(0.125),
        mx.image.SaturationJitterAug(0.125),
    ]
    expected = mx.nd.array(image[:, :, ::-1].astype(np.float32))  # RGB
    for which in order:
        monkeypatch.setattr("random.uniform", lambda *_, which=which: factors[which])
        expected = jitters[which](expected)
    mine = jitter_color(image, *((factors / 0.125 + 1) / 2))
    np.testing.assert_allclose(mine[:, :, ::-1], expected.asnumpy().clip(0, 255), atol=1.01)


def test_jitter_of_one_half_changes_nothing(image):
    np.testing.assert_array_equal(jitter_color(image, 0.5, 0.5, 0.5), image)


def test_recompression_spans_the_qualities(image, monkeypatch):
    seen = []
    real = augment.encode
    monkeypatch.setattr(
        augment,
        "encode",
        lambda image, quality: seen.append(quality) or real(image, ".jpg", quality),
    )
    results = [recompress(image, draw) for draw in (0.0, 0.5, 0.9999)]
    assert seen == [2, 11, 20]
    errors = [np.abs(result.astype(int) - image).mean() for result in results]
    assert errors[0] > errors[1] > errors[2] > 0


def test_color_two_recompresses_before_the_jitter(image):
    chosen = draws(RECOMPRESS=0.1, QUALITY=0.3, BRIGHTNESS=0.9, CONTRAST=0.2, SATURATION=0.7)
    expected = jitter_color(recompress(image, 0.3), 0.9, 0.2, 0.7)
    np.testing.assert_array_equal(Augmentation(color=2)(image, chosen), expected)
    chosen = draws(RECOMPRESS=0.6, BRIGHTNESS=0.9, CONTRAST=0.2, SATURATION=0.7)
    expected = jitter_color(image, 0.9, 0.2, 0.7)
    np.testing.assert_array_equal(Augmentation(color=2)(image, chosen), expected)


@pytest.mark.parametrize(
    ("row", "column", "rows", "columns"),
    [
        (0.5, 0.5, (51, 61), (51, 61)),
        (0.0, 0.5, (0, 5), (51, 61)),
        (0.999, 0.0, (106, 112), (0, 5)),
    ],
)
def test_cut_out(image, row, column, rows, columns):
    expected = image.copy()
    expected[slice(*rows), slice(*columns)] = 128
    np.testing.assert_array_equal(cut_out(image.copy(), 10, row, column), expected)
    chosen = draws(CUT=0.1, CUT_ROW=row, CUT_COLUMN=column)
    np.testing.assert_array_equal(Augmentation(cutoff=10)(image.copy(), chosen), expected)


def test_bad_options():
    with pytest.raises(ValueError, match="color must be 0, 1 or 2, not 3"):
        Augmentation(color=3)
    with pytest.raises(ValueError, match="cutoff"):
        Augmentation(cutoff=-1)
