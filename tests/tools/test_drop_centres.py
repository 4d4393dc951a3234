"""Which images the main centre of their class keeps."""

import csv
import json

import numpy as np
import pytest

from dsoftmax.eval.embed import embed_images
from dsoftmax.eval.models import load_model
from dsoftmax.recognition import subcentres
from dsoftmax.recognition.data.images import load_rgb
from dsoftmax.recognition.data.records import Records, RecordWriter
from dsoftmax.tools import drop_centres


def test_the_main_centre_has_most_images():
    cosines = np.array(
        [[0.9, 0.1], [0.3, 0.8], [0.8, 0.2], [0.1, 0.2], [0.0, 0.9], [np.nan, np.nan]]
    )
    choice = subcentres.choose(cosines, np.array([0, 0, 0, 2, 2, 2]), 3, angle=75)
    assert choice.dominant.tolist() == [0, 0, 1]
    assert choice.is_kept.tolist() == [True, True, True, False, True, False]
    assert choice.angles[1] == pytest.approx(np.degrees(np.arccos(0.3)))


@pytest.fixture
def job(tmp_path, jpeg, symbol_model):
    """Write three classes of images and their centres; return the flags of the command."""
    images = [(label, jpeg(32, 32)) for label in (0, 0, 0, 1, 1, 2, 2)]
    with RecordWriter(tmp_path / "faces", image_size=(32, 32)) as writer:
        for label, image in [*images[:5], (1, b"broken"), *images[5:]]:
            writer.add(label, image)
        writer.names = {0: "Ann", 1: "Bo", 2: "Cy"}
    model = f"{symbol_model()},0"
    pixels = [load_rgb(np.frombuffer(image, np.uint8)) for _, image in images]
    found = embed_images(load_model(model), pixels)
    means = [found[:3].mean(axis=0), found[3:5].mean(axis=0)]
    far = np.linalg.svd(found)[2][-1]  # at a right angle to all images
    centres = np.stack([-means[0], 5 * means[0], means[1], far, far, far])
    np.save(tmp_path / "classes.npy", centres.astype(np.float32))
    flags = ["--model", model, "--classes", tmp_path / "classes.npy", "--threads", 1]
    flags += ["--data-dir", tmp_path / "faces", "--output", tmp_path / "clean"]
    return [str(flag) for flag in flags], images, centres


def test_images_far_from_it_are_left_out(job, tmp_path, capsys):
    flags, images, centres = job
    assert drop_centres.main(flags) == 0
    expected = "5 images of 2 identities kept, 3 images and 1 identities left out"
    assert expected in capsys.readouterr().out
    clean = Records(tmp_path / "clean")
    assert [(label, image.tobytes()) for label, image in map(clean.read, range(5))] == images[:5]
    assert clean.names == {0: "Ann", 1: "Bo"}
    np.testing.assert_allclose(np.load(tmp_path / "clean" / "classes.npy"), centres[[1, 2]])
    with open(tmp_path / "clean" / "dropped.csv", newline="") as file:
        dropped = [(row["image"], row["label"], row["degrees"]) for row in csv.DictReader(file)]
    assert [row[:2] for row in dropped] == [("5", "1"), ("6", "2"), ("7", "2")]
    assert dropped[0][2] == "unreadable"
    assert float(dropped[1][2]) == pytest.approx(90, abs=1)


def test_json(job, capsys):
    assert drop_centres.main([*job[0], "--json"]) == 0
    counts = {"identities": 2, "images": 5, "dropped": 3, "left_out": 1}
    assert json.loads(capsys.readouterr().out) == counts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--angle", "0"], "--angle must lie in (0, 180] degrees, not 0"),
        (["--angle", "0.001"], "nothing would be left"),
    ],
)
def test_bad_angles(job, change, message, capsys):
    assert drop_centres.main([*job[0], *change]) == 2
    assert message in capsys.readouterr().err


def test_one_centre_per_class(job, tmp_path, capsys):
    np.save(tmp_path / "classes.npy", np.zeros((3, 16), np.float32))
    assert drop_centres.main(job[0]) == 2
    assert "train on it with --loss-option subcentres=3" in capsys.readouterr().err
    assert not (tmp_path / "clean").exists()
