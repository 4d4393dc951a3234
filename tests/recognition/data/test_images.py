import struct
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
from huge_images import HUGE

from dsoftmax.recognition.data.images import (
    ARCFACE_TEMPLATE,
    ImageError,
    align,
    announced_size,
    decode,
    encode,
    face_of,
    fit,
    fitted_note,
    fitted_warning,
    load_rgb,
    similarity_transform,
)
from tests.conftest import make_image


def as_array(encoded: bytes) -> np.ndarray:
    return np.frombuffer(encoded, np.uint8)


def test_round_trip_without_loss(rng):
    image = rng.integers(0, 256, (17, 23, 3), np.uint8)
    np.testing.assert_array_equal(decode(as_array(encode(image, ".png"))), image)


def test_load_rgb(rng, tmp_path):
    image = rng.integers(0, 256, (40, 30, 3), np.uint8)
    path = tmp_path / "image.png"
    path.write_bytes(encode(image, ".png"))
    landmarks = rng.uniform(5, 25, (5, 2))
    for source in (path, str(path), as_array(path.read_bytes())):
        np.testing.assert_array_equal(load_rgb(source), image[:, :, ::-1])
        fitted = load_rgb(source, (16, 20))
        np.testing.assert_array_equal(fitted, fit(image, 16, 20)[:, :, ::-1])
        aligned = load_rgb(source, (16, 20), landmarks)
        np.testing.assert_array_equal(aligned, align(image, landmarks, (16, 20))[:, :, ::-1])
    with pytest.raises(FileNotFoundError):
        load_rgb(tmp_path / "nothing.png")


def test_photographs_without_landmarks_are_named(rng):
    photo, landmarks = make_image(rng, 40, 30), rng.uniform(5, 25, (5, 2))
    aligned = face_of(photo, (16, 20), landmarks)
    np.testing.assert_array_equal(aligned.image, align(photo, landmarks, (16, 20)))
    assert aligned.fitted_from is None
    assert face_of(photo, (40, 30)) == (photo, None, None)
    fitted = face_of(photo, (16, 20))
    np.testing.assert_array_equal(fitted.image, fit(photo, 16, 20))
    notes = [fitted_note(name, fitted.fitted_from) for name in "abcde"]
    assert notes[0] == "a (40x30)"
    named = ["  a (40x30)", "  b (40x30)", "  c (40x30)"]
    for few, expected in (
        (notes[:2], ["Warning: 2 images", *named[:2]]),
        (notes, ["Warning: 5 images", *named, "  ... and 2 more"]),
    ):
        head, *lines, last = fitted_warning(few, (16, 20), "align them").splitlines()
        assert [head.partition(" were not 16x20 ")[0], *lines] == expected
        assert last.endswith("not whole photographs: align them.")


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


KINDS = {
    "baseline": [],
    "progressive": [cv2.IMWRITE_JPEG_PROGRESSIVE, 1],
    "restarts": [cv2.IMWRITE_JPEG_RST_INTERVAL, 1],
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_phones_append_to_a_jpeg(kind, rng):
    """A film, a second picture, a maker's data: thousands of bytes behind the end marker."""
    picture = rng.integers(0, 256, (40, 56, 3), np.uint8)  # noise: all bytes occur in the JPEG
    options = [cv2.IMWRITE_JPEG_QUALITY, 98, *KINDS[kind]]
    whole = cv2.imencode(".jpg", picture, options)[1].tobytes()
    thumbnail = cv2.imencode(".jpg", make_image(rng, 8, 9))[1].tobytes()
    exif = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    whole = whole[:2] + exif + whole[2:]
    expected = cv2.imdecode(as_array(whole), cv2.IMREAD_COLOR)
    film = struct.pack(">I", 24) + b"ftypmp42" + rng.bytes(20000)
    for trailer in (film, thumbnail, thumbnail[:-9], b"\0" * 300, b"SEFT" + film + b"SEFT"):
        np.testing.assert_array_equal(decode(as_array(whole + trailer)), expected)
    for kept in range(len(exif) + 2, len(whole) - 1, 37):
        for trailer in (b"", b"\0" * 5000):
            with pytest.raises(ImageError):
                decode(as_array(whole[:kept] + trailer))


FORMATS = (".jpg", ".png", ".bmp", ".ppm", ".tiff", ".webp")


@pytest.mark.parametrize("extension", FORMATS)
def test_announced_size(extension, rng):
    picture = make_image(rng, 20, 30)
    encoded = cv2.imencode(extension, picture)[1]
    assert announced_size(encoded.tobytes()) == (20, 30)
    assert np.abs(decode(encoded).astype(int) - picture).mean() < 10


@pytest.mark.parametrize(
    "options", [[cv2.IMWRITE_JPEG_PROGRESSIVE, 1], [cv2.IMWRITE_JPEG_RST_INTERVAL, 1]]
)
def test_announced_size_of_other_jpegs(options, rng):
    encoded = cv2.imencode(".jpg", make_image(rng, 20, 30), options)[1].tobytes()
    assert announced_size(encoded) == (20, 30)
    thumbnail = cv2.imencode(".jpg", make_image(rng, 8, 9))[1].tobytes()
    exif = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    filled = encoded[:2] + exif + b"junk" + b"\xff\xff" + encoded[2:]
    assert announced_size(filled) == (20, 30)
    assert decode(as_array(filled)).shape == (20, 30, 3)


@pytest.mark.parametrize("name", HUGE)
def test_more_pixels_than_there_is_memory_for(name, monkeypatch):
    """As every thread of a reader may meet them: nothing is decoded."""
    monkeypatch.setattr(cv2, "imdecode", None)
    with ThreadPoolExecutor(2) as pool:
        for found in [pool.submit(decode, as_array(HUGE[name])) for _ in range(2)]:
            with pytest.raises(ImageError, match=r"pixels"):
                found.result()


def test_what_opencv_refuses_is_no_image(monkeypatch):
    def refuse(*_):
        raise cv2.error("Insufficient memory")

    monkeypatch.setattr(cv2, "imdecode", refuse)
    with pytest.raises(ImageError, match="OpenCV can't decode it: Insufficient memory"):
        decode(as_array(encode(np.zeros((4, 4, 3), np.uint8))))


@pytest.mark.parametrize("shape", [(1, 8000), (8000, 1)])
def test_a_narrow_image_is_not_blown_up(shape):
    """To cover 112×112 this one would take 300 MB; with a million columns, 37 GB."""
    with pytest.raises(ImageError, match="too narrow an image to be fitted to 112x112"):
        fit(np.zeros((*shape, 3), np.uint8), 112, 112)


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


def test_large_faces_are_averaged(rng):
    """A face of many pixels: all of them count, as if it were warped large and then reduced."""
    photo = cv2.resize(make_image(rng, 40, 40), (1600, 1600), interpolation=cv2.INTER_CUBIC)
    noisy = np.clip(photo + rng.normal(0, 60, photo.shape), 0, 255).astype(np.uint8)
    turn = np.array([[0.96, -0.28], [0.28, 0.96]])
    landmarks = (ARCFACE_TEMPLATE - 56) @ turn.T * 11 + 800
    # The middle of a pixel of 112 is between the fourth and the fifth of eight.
    larger = similarity_transform(landmarks, ARCFACE_TEMPLATE * 8 + 3.5)
    plain = similarity_transform(landmarks, ARCFACE_TEMPLATE)

    def errors(image):
        fine = cv2.warpAffine(image, larger, (896, 896))
        expected = cv2.resize(fine, (112, 112), interpolation=cv2.INTER_AREA).astype(int)
        skipping = cv2.warpAffine(image, plain, (112, 112))
        return [
            np.abs(one - expected).mean() for one in (align(image, landmarks, (112, 112)), skipping)
        ]

    averaged, skipped = errors(noisy)
    assert averaged < 5
    assert skipped > 20
    assert max(errors(photo)) < 1  # and faces stay where they were
