"""Every kind of input gives the same images, with their names, labels and landmarks."""

import cv2
import numpy as np
import pytest

from dsoftmax.recognition.data.images import ImageError, align, decode, fit
from dsoftmax.recognition.data.inputs import open_images
from dsoftmax.recognition.data.packs import write_pack
from tests.conftest import make_image


@pytest.fixture
def save(tmp_path, rng):
    """Write another picture at each call; return it, blue, green, red."""

    def write(path, height=32, width=32):
        picture = make_image(rng, height, width)
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(cv2.imencode(".png", picture)[1].tobytes())
        return picture

    return write


def described(images):
    return [(images.name(n), images.label(n)) for n in range(len(images))]


def test_files(save, tmp_path):
    pictures = [save("b.png"), save("a.png", 40, 30)]
    paths = [str(tmp_path / name) for name in ("b.png", "a.png")]
    images = open_images(paths)
    assert described(images) == [(path, "") for path in paths]
    for number, picture in enumerate(pictures):
        np.testing.assert_array_equal(images.decode(number), picture)
        face = images.load(number, (16, 20))
        np.testing.assert_array_equal(face.image, fit(picture, 16, 20)[:, :, ::-1])
        assert face.fitted_from == picture.shape[:2]
    assert images.load(0, (32, 32)).fitted_from is None
    assert len(open_images(paths[0])) == 1


def test_folders(save, tmp_path):
    for name in ("in/10.png", "in/9.png", "in/bo/1.png", "in/ann/deep/2.png", "in/.x/1.png"):
        save(name)
    (tmp_path / "in/notes.txt").write_text("x")
    found = described(open_images(str(tmp_path / "in")))
    expected = [("9.png", ""), ("10.png", ""), ("ann/deep/2.png", "ann"), ("bo/1.png", "bo")]
    assert found == [(f"{tmp_path}/in/{name}", label) for name, label in expected]


POINTS = np.array([[8, 9], [20, 10], [14, 16], [9, 22], [19, 23]], float)
ROW = " ".join(f"{value:g}" for value in POINTS.ravel())


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        (f"ann/1.png 1 2 30 31 {ROW}\n", ["ann"]),
        (f"ann/1.png\t1\t2\t30\t31\t{ROW}\n".replace(" ", "\t"), ["ann"]),
        (f"ann/1.png,7,{ROW}\n".replace(" ", ","), ["7"]),
        (
            "label,path,x1,y1,x2,y2,x3,y3,x4,y4,x5,y5,more\n"
            f'a,ann/1.png,{ROW},1\nb,"my, own.png"{"," * 11}\n'.replace(" ", ",").replace(
                "my,,own", "my, own"
            ),
            ["a", "b"],
        ),
        (
            "0\tann/1.png\t5\t0\t0\t0\t0\t"
            + "\t".join(f"{value:g}" for value in POINTS.T.ravel())
            + "\n1\tmy, own.png\t6\n",
            ["5", "6"],
        ),
    ],
)
def test_lists_with_landmarks(save, tmp_path, content, labels):
    picture = save("photos/ann/1.png", 33, 35)
    save("photos/my, own.png")
    (tmp_path / "photos/list.txt").write_text(content)
    images = open_images(str(tmp_path / "photos/list.txt"))
    paths = [f"{tmp_path}/photos/{name}" for name in ("ann/1.png", "my, own.png")]
    assert described(images) == list(zip(paths, labels))
    face = images.load(0, (32, 32))
    np.testing.assert_array_equal(face.image, align(picture, POINTS, (32, 32))[:, :, ::-1])
    assert face.fitted_from is None
    if len(images) > 1:
        assert images.landmarks(1) is None


def test_lists_of_paths(save, tmp_path):
    save("photos/my photo.png")
    save("photos/b.png")
    (tmp_path / "list.txt").write_text("my photo.png\nb.png\n\nmissing.png\nb.png 7\n")
    images = open_images(str(tmp_path / "list.txt"), str(tmp_path / "photos"))
    names = ["my photo.png", "b.png", "missing.png", "b.png"]
    expected = [
        (f"{tmp_path}/photos/{name}", label) for name, label in zip(names, ["", "", "", "7"])
    ]
    assert described(images) == expected
    with pytest.raises(ImageError, match="No such file"):
        images.load(2, (32, 32))


def test_a_csv_with_four_landmarks_is_refused(tmp_path):
    (tmp_path / "list.csv").write_text("path,x1,y1\na.png,1,2\n")
    with pytest.raises(ValueError, match=r"list.csv: line 2: the landmarks are x1, y1, .*missing"):
        open_images(str(tmp_path / "list.csv"))


@pytest.mark.parametrize("header", [True, False])
def test_datasets(dataset, header):
    folder, content = dataset(identity_header=header)
    for path in (folder, folder / "train.rec"):
        images = open_images(str(path))
        assert images.image_size == (32, 32)
        expected = [(str(n + header), str(label)) for n, (label, _) in enumerate(content)]
        assert described(images) == expected
        picture = decode(np.frombuffer(content[3][1], np.uint8))
        np.testing.assert_array_equal(images.load(3, (32, 32)).image, picture[:, :, ::-1])


def test_a_broken_record_is_an_image_error(dataset):
    folder, content = dataset()
    images = open_images(str(folder))
    whole = (folder / "train.rec").read_bytes()
    place = whole.index(content[4][1])
    (folder / "train.rec").write_bytes(whole[:place] + b"\0" * 50 + whole[place + 50 :])
    images = open_images(str(folder))
    with pytest.raises(ImageError):
        images.load(4, (32, 32))
    images.load(5, (32, 32))


def test_packs(tmp_path, jpeg):
    encoded = [jpeg() for _ in range(4)]
    people = [("ann", "ann"), ("ann", "bo")]
    write_pack(str(tmp_path / "own.bin"), encoded, [True, False], people)
    images = open_images(str(tmp_path / "own.bin"))
    assert described(images) == [("0", "ann"), ("1", "ann"), ("2", "ann"), ("3", "bo")]
    assert images.image_size == (32, 32)
    picture = decode(np.frombuffer(encoded[2], np.uint8))
    np.testing.assert_array_equal(images.decode(2), picture)
    write_pack(str(tmp_path / "own.bin"), [b"no image", *encoded[1:]], [True, False])
    images = open_images(str(tmp_path / "own.bin"))
    assert images.label(0) == ""
    assert images.image_size == (112, 112)


def test_digests_tell_inputs_apart(save, tmp_path, dataset):
    save("in/a.png")
    save("in/b.png")
    folder = str(tmp_path / "in")
    before = open_images(folder).digest()
    assert open_images(folder).digest() == before
    save("in/b.png", 33, 33)
    assert open_images(folder).digest() != before
    records, _ = dataset()
    one = open_images(str(records)).digest()
    other, _ = dataset(counts=(2, 2), name="other")
    assert open_images(str(other)).digest() != one == open_images(str(records)).digest()


def test_mistakes_of_users(tmp_path, save):
    save("a.png")
    (tmp_path / "film.mp4").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"none.png: there is no such file"):
        open_images([str(tmp_path / "a.png"), str(tmp_path / "none.png")])
    with pytest.raises(ValueError, match="several image files, or one folder"):
        open_images([str(tmp_path / "a.png"), str(tmp_path)])
    with pytest.raises(ValueError, match=r"film.mp4: it is neither a folder"):
        open_images(str(tmp_path / "film.mp4"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no images in it"):
        open_images(str(tmp_path / "empty"))
