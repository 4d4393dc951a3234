import cv2
import numpy as np
import pytest

from dsoftmax.recognition.data.images import (
    ARCFACE_TEMPLATE,
    ImageError,
    align,
    decode,
    encode,
    fit,
    similarity_transform,
)


def as_array(encoded: bytes) -> np.ndarray:
    return np.frombuffer(encoded, np.uint8)


def test_round_trip_without_loss(rng):
    image = rng.integers(0, 256, (17, 23, 3), np.uint8)
    np.testing.assert_array_equal(decode(as_array(encode(image, ".png"))), image)


@pytest.mark.parametrize("content", [b"", b"no image", b"\xff\xd8\xff\xd9"])
def test_what_is_no_image(content):
    with pytest.raises(ImageError):
        decode(as_array(content))


@pytest.mark.parametrize("part", [0.3, 0.5, 0.9, 0.99])
def test_a_jpeg_cut_off_is_not_taken_for_one(jpeg, part):
    whole = jpeg(64, 64)
    with pytest.raises(ImageError):
        decode(as_array(whole[: int(len(whole) * part)]))
    decode(as_array(whole + b"\0" * 8))  # padding behind the end is common


@pytest.mark.parametrize("shape", [(112, 112), (200, 112), (113, 200), (56, 80), (30, 20)])
def test_fit_covers_and_keeps_the_middle(shape):
    image = np.zeros((*shape, 3), np.uint8)
    rows, columns = shape
    cv2.circle(image, (columns // 2, rows // 2), min(shape) // 8, (255, 255, 255), -1)
    fitted = fit(image, 112, 112)
    assert fitted.shape == (112, 112, 3)
    middle = np.argwhere(fitted[:, :, 0] > 127).mean(axis=0)
    np.testing.assert_allclose(middle, [56, 56], atol=3)


def test_similarity_is_recovered_exactly(rng):
    turn, scale, shift = rng.uniform(-3, 3), rng.uniform(0.2, 5), rng.normal(size=2) * 50
    rotation = scale * np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    source = rng.normal(size=(5, 2)) * 20
    found = similarity_transform(source, source @ rotation.T + shift)
    np.testing.assert_allclose(found, np.column_stack([rotation, shift]), atol=1e-9)


def test_similarity_is_the_least_squares_one(rng):
    """Against the general solver, on points no similarity fits."""
    source, target = rng.normal(size=(2, 5, 2)) * 20
    x, y = source.T
    one, zero = np.ones(5), np.zeros(5)
    system = np.vstack([np.column_stack([x, -y, one, zero]), np.column_stack([y, x, zero, one])])
    a, b, dx, dy = np.linalg.lstsq(system, target.T.ravel(), rcond=None)[0]
    expected = [[a, -b, dx], [b, a, dy]]
    np.testing.assert_allclose(similarity_transform(source, target), expected, atol=1e-9)


@pytest.mark.parametrize(("size", "shift"), [((112, 112), 0), ((112, 96), -8), ((56, 56), 0)])
def test_alignment_brings_landmarks_onto_the_template(rng, size, shift):
    turn = 0.3
    rotation = 1.7 * np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    landmarks = ARCFACE_TEMPLATE @ rotation.T + [120, 60]
    image = np.zeros((400, 400, 3), np.uint8)
    for x, y in landmarks:
        cv2.circle(image, (round(x), round(y)), 4, (255, 255, 255), -1)
    aligned = align(image, landmarks, size)
    assert aligned.shape == (*size, 3)
    expected = ARCFACE_TEMPLATE * size[0] / 112 + [shift, 0]
    for x, y in expected:
        assert aligned[round(y), round(x)].min() > 127
    assert (aligned[0] == 0).all()


def test_landmarks_of_one_point(rng):
    with pytest.raises(ImageError, match="one point"):
        align(np.zeros((9, 9, 3), np.uint8), np.ones((5, 2)), (112, 112))
