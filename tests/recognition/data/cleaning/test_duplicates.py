"""Hashes of images, and pairs of them that differ in few bits."""

import cv2
import numpy as np

from dsoftmax.recognition.data.cleaning import duplicates
from dsoftmax.recognition.data.cleaning.duplicates import (
    HASH_BYTES,
    dhash,
    hash_images,
    near_hashes,
)
from dsoftmax.recognition.data.images import decode, encode
from dsoftmax.recognition.data.records import Records, RecordWriter


def differing_bits(one, other):
    return bin(int.from_bytes(one.tobytes(), "big") ^ int.from_bytes(other.tobytes(), "big")).count(
        "1"
    )


def test_a_hash_is_what_is_brighter_than_its_right_neighbour():
    ramp = np.tile(np.linspace(0, 255, 112).astype(np.uint8)[None, :, None], (112, 1, 3))
    assert not dhash(ramp).any()
    assert (dhash(ramp[:, ::-1]) == 255).all()


def test_a_copy_has_nearly_the_same_hash(jpeg):
    one, other = (decode(np.frombuffer(jpeg(112, 112), np.uint8)) for _ in range(2))
    poor = decode(np.frombuffer(encode(one, quality=40), np.uint8))
    assert differing_bits(dhash(one), dhash(poor)) <= 16
    assert differing_bits(dhash(one), dhash(other)) > 40


def test_near_hashes_are_those_of_all_pairs(rng, monkeypatch):
    monkeypatch.setattr(duplicates, "MOST_COMPARED", 1000)
    hashes = rng.integers(0, 256, (120, HASH_BYTES), np.uint8)
    for place in range(60):  # each has a copy with up to 9 other bits: one of 11 bands is equal
        bits = np.unpackbits(hashes[place])
        bits[rng.choice(len(bits), place % 10, replace=False)] ^= 1
        hashes[60 + place] = np.packbits(bits)
    found = near_hashes(hashes, 9)
    expected = [
        [one, other]
        for one in range(120)
        for other in range(one + 1, 120)
        if differing_bits(hashes[one], hashes[other]) <= 9
    ]
    assert len(expected) >= 60
    assert found.tolist() == expected


def test_many_equal_hashes_do_not_take_all_pairs(monkeypatch):
    """A folder of blank images must not take quadratic time; each still has a neighbour."""
    monkeypatch.setattr(duplicates, "MOST_COMPARED", 3)
    pairs = near_hashes(np.zeros((100, HASH_BYTES), np.uint8))
    assert len(pairs) == 99 + 98
    assert np.unique(pairs).tolist() == list(range(100))


def test_images_that_cannot_be_read_are_told(tmp_path, jpeg):
    good, image = jpeg(), jpeg()
    with RecordWriter(tmp_path / "faces", (32, 32)) as writer:
        for content in (good, image[: len(image) // 2], good):
            writer.add(0, content)
    hashes, unreadable = hash_images(Records(tmp_path / "faces"), threads=2)
    assert list(unreadable) == [1]
    assert "cut off" in unreadable[1]
    assert (hashes[0] == dhash(cv2.imdecode(np.frombuffer(good, np.uint8), 1))).all()
    assert near_hashes(hashes).tolist() == [[0, 2]]
