import dataclasses

import cv2
import numpy as np
import pytest

from dsoftmax.recognition.data import synthetic
from dsoftmax.recognition.data.images import ARCFACE_TEMPLATE, decode
from dsoftmax.recognition.data.packs import read_pack
from dsoftmax.recognition.data.records import Records
from dsoftmax.recognition.data.synthetic import dataset, people
from dsoftmax.recognition.data.synthetic.drawing import Camera
from dsoftmax.recognition.data.synthetic.head_shape import HeadShape
from dsoftmax.tools import synthetic_faces

SMALL = {"identities": 3, "images": 4, "val_identities": 4, "pairs": 20, "size": 48}
FILES = ["property", "sheet.png", "train.idx", "train.rec", "val.bin"]


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_an_image_is_a_function_of_seed_identity_and_image():
    face = synthetic.draw_face(1, 5, 3)
    assert face.shape == (112, 112, 3)
    assert face.dtype == np.uint8
    np.testing.assert_array_equal(face, synthetic.draw_face(1, 5, 3))
    for other in [(2, 5, 3), (1, 6, 3), (1, 5, 4)]:
        assert np.abs(face - synthetic.draw_face(*other).astype(float)).mean() > 2


def test_identities_photos_and_pairs_have_seeds_of_their_own(monkeypatch):
    keys = [(1, dataset.PAIRS_KEY)]
    monkeypatch.setattr(people, "_sample", lambda kind, *key: keys.append(key))
    for identity in (0, 1, synthetic.FIRST_VAL_IDENTITY, synthetic.FIRST_VAL_IDENTITY + 1):
        synthetic.draw_identity(1, identity)
        for image in range(3):
            synthetic.draw_photo(1, identity, image)
    states = {tuple(np.random.SeedSequence(key).generate_state(4)) for key in keys}
    assert len(states) == len(keys) == 17  # numpy takes (1, 5) and (1, 5, 0) for one key


def test_all_images_of_a_person_share_the_identity(monkeypatch):
    seen = []
    monkeypatch.setattr(dataset, "draw", lambda head, photo, size: seen.append((head, photo)))
    monkeypatch.setattr(dataset, "encode", lambda image: b"")
    synthetic.draw_person(1, 7, range(5), 48)
    assert {head.identity for head, _ in seen} == {synthetic.draw_identity(1, 7)}
    assert len({photo for _, photo in seen}) == 5
    assert synthetic.draw_identity(1, 7) != synthetic.draw_identity(1, 8)


@pytest.mark.parametrize("size", [33, 56, 112, 224])
def test_sizes_show_the_same_face(size):
    face = synthetic.draw_face(1, 3, 2, size)
    assert face.shape == (size, size, 3)
    small = cv2.resize(face, (28, 28), interpolation=cv2.INTER_AREA).astype(float)
    reference = cv2.resize(synthetic.draw_face(1, 3, 2), (28, 28), interpolation=cv2.INTER_AREA)
    assert np.corrcoef(small.ravel(), reference.ravel())[0, 1] > 0.93


def test_faces_are_aligned_to_the_template():
    photo = dataclasses.replace(
        synthetic.draw_photo(1, 0, 0),
        **dict.fromkeys(["yaw", "pitch", "roll", "shift_x", "shift_y", "smile"], 0.0),
        scale=1.0,
    )
    for identity in range(10):
        head = HeadShape(synthetic.draw_identity(1, identity), 112)
        spacing = head.identity.eye_spacing
        eyes = head.lift(np.array([(-spacing, 0.0), (spacing, 0.0)]))
        assert np.abs(Camera(head, photo, 112).project(eyes) - ARCFACE_TEMPLATE[:2]).max() < 6
    turned = dataclasses.replace(photo, yaw=0.4)
    straight, turned = (Camera(head, p, 112).rotation[2, 0] for p in (photo, turned))
    assert straight == 0
    assert abs(turned) > 0.3


def test_dataset_is_readable_and_complete(tmp_path):
    summary = synthetic.make_dataset(tmp_path / "faces", **SMALL)
    assert sorted(content(tmp_path / "faces")) == FILES
    records = Records(tmp_path / "faces")
    assert records.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert records.property == (3, 48, 48)
    for image in range(12):
        label, encoded = records.read(image)
        again = synthetic.draw_person(1, label, [image % 4], 48)
        assert encoded.tobytes() == again[0]
    sheet = cv2.imread(str(tmp_path / "faces" / "sheet.png"))
    assert sheet.shape == (3 * 48, 4 * 48, 3)
    assert (summary["images"], summary["pairs"], summary["val_identities"]) == (12, 20, 4)


def test_same_bytes_whatever_the_number_of_processes(tmp_path):
    for threads in (1, 2):
        synthetic.make_dataset(tmp_path / str(threads), **SMALL, threads=threads)
    assert content(tmp_path / "1") == content(tmp_path / "2")


def test_a_larger_dataset_begins_with_the_smaller_one(tmp_path):
    synthetic.make_dataset(tmp_path / "small", **SMALL)
    synthetic.make_dataset(tmp_path / "large", **{**SMALL, "identities": 5})
    small, large = Records(tmp_path / "small"), Records(tmp_path / "large")
    for image in range(len(small)):
        assert small.read(image)[1].tobytes() == large.read(image)[1].tobytes()
    assert content(tmp_path / "small")["val.bin"] == content(tmp_path / "large")["val.bin"]


def test_pairs_are_distinct_balanced_and_of_other_people(tmp_path):
    chosen = synthetic.choose_pairs(3, identities=5, images=4, pairs=60)  # all 30 of one person
    issame = chosen[:, 0, 0] == chosen[:, 1, 0]
    assert issame.tolist() == [True, False] * 30
    assert not (chosen[:, 0] == chosen[:, 1]).all(axis=1).any()
    assert len({frozenset(map(tuple, pair)) for pair in chosen.tolist()}) == 60
    assert chosen[..., 0].max() == 4
    assert chosen[..., 1].max() == 3

    synthetic.make_dataset(tmp_path, **SMALL)
    pack = read_pack(tmp_path / "val.bin")
    assert all(fold.sum() == 1 for fold in pack.issame.reshape(10, 2))
    records = Records(tmp_path)
    in_training = {records.read(image)[1].tobytes() for image in range(len(records))}
    assert in_training.isdisjoint(image.tobytes() for image in pack.images)
    identity, image = synthetic.choose_pairs(1, 4, 4, 20)[0, 0].tolist()
    face = synthetic.draw_face(1, synthetic.FIRST_VAL_IDENTITY + identity, image, 48)
    assert np.abs(decode(pack.images[0]) - face.astype(float)).mean() < 4  # JPEG, no more


def test_pixels_alone_tell_little(tmp_path):
    synthetic.make_dataset(tmp_path, 1, 6, val_identities=40, pairs=200, size=56)
    pack = read_pack(tmp_path / "val.bin")
    pixels = np.array([pack.decode(image).ravel() for image in range(400)], float)
    pixels /= np.linalg.norm(pixels, axis=1, keepdims=True)
    similarity = (pixels[::2] * pixels[1::2]).sum(axis=1)
    accuracy = max(np.mean((similarity >= threshold) == pack.issame) for threshold in similarity)
    assert 0.5 < accuracy < 0.8


def test_without_pairs_there_is_no_pack(tmp_path):
    synthetic.make_dataset(tmp_path, 2, 1, val_identities=0, pairs=0, size=32)
    assert sorted(content(tmp_path)) == [name for name in FILES if name != "val.bin"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"identities": 0}, "--identities must be from 1 to 16777216, not 0"),
        ({"images": 1}, "--images must be from 2"),
        ({"val_identities": 1}, "--val-identities must be from 2"),
        ({"pairs": 30}, "--pairs must be a multiple of 20, not 30"),
        ({"pairs": 60}, "needs 30 different pairs of one person, but .* have 24"),
        ({"seed": -1}, "--seed must be from 0 to 4294967295, not -1"),
        ({"size": 8}, "--size must be from 32 to 1024, not 8"),
        ({"threads": 0}, "--threads must be from 1"),
    ],
)
def test_bad_arguments_are_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        synthetic.make_dataset(tmp_path / "faces", **{**SMALL, **change})
    assert not (tmp_path / "faces").exists()


def test_command(tmp_path, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    arguments = ["--output", str(tmp_path / "faces"), *flags, "--threads", "1"]
    assert synthetic_faces.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "12 images of 3 identities and 20 pairs of 4 others" in printed
    assert "images/s" in printed
    assert "sheet.png" in printed
    assert synthetic_faces.main(arguments) == 2
    assert "exists" in capsys.readouterr().err
    assert synthetic_faces.main([*arguments, "--overwrite", "--seed", "2"]) == 0
