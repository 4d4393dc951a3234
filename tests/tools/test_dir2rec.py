import os
import re
import shutil

import cv2
import numpy as np
import pytest

from dsoftmax.recognition.data import folders
from dsoftmax.recognition.data.identities import read_table
from dsoftmax.recognition.data.images import ARCFACE_TEMPLATE, align, decode
from dsoftmax.recognition.data.records import Records
from dsoftmax.tools import dir2rec, rec2dir, rec_info


def save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cv2.imencode(path.suffix, image)[1].tobytes())
    return image


@pytest.fixture
def picture(rng):
    def make(height=112, width=112):
        coarse = rng.integers(0, 256, (6, 6, 3), np.uint8)
        return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)

    return make


def test_folder_per_identity(tmp_path, picture, capsys):
    for name in ("p10/b.jpg", "p10/a.jpg", "p2/x2.png", "p2/x10.jpg", "p1/deeper/one.jpg"):
        save(tmp_path / "in" / name, picture())
    (tmp_path / "in" / "p1" / "notes.txt").write_text("no image")
    (tmp_path / "in" / "empty").mkdir()
    arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert dir2rec.main(arguments) == 0
    assert "5 images of 3 identities" in capsys.readouterr().out
    records = Records(tmp_path / "out")
    assert records.labels.tolist() == [0, 1, 1, 2, 2]  # p1, p2, p10: numbers sort as numbers
    assert records.property == (3, 112, 112)
    expected = [
        (tmp_path / "in" / name).read_bytes()
        for name in ("p1/deeper/one.jpg", "p2/x10.jpg", "p10/a.jpg", "p10/b.jpg")
    ]
    stored = [records.read(image)[1].tobytes() for image in (0, 2, 3, 4)]
    assert stored == expected  # what fits is stored byte for byte
    assert records.read(1)[1][:2].tobytes() == b"\xff\xd8"  # the PNG became a JPEG


def test_names_are_kept(tmp_path, picture, capsys):
    """Odd ones too: digits that are no numbers, commas, quotes, bytes that are no UTF-8."""
    names = ["2²", 'Zoë, the "first"', os.fsdecode(b"M\xfcller"), "10", "٣", "2"]
    for name in names:
        save(tmp_path / "in" / name / "1.jpg", picture())
    save(tmp_path / "in" / "10" / "2.jpg", picture())
    arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert dir2rec.main(arguments) == 0
    records = Records(tmp_path / "out")
    assert sorted(records.names.values()) == sorted(names)
    assert list(records.names) == list(range(6))
    counts = {row["name"]: row["images"] for row in read_table(tmp_path / "out/identities.csv")}
    assert counts == {**dict.fromkeys(names, "1"), "10": "2"}
    for image, label in enumerate(records.labels):
        of_name = {path.read_bytes() for path in (tmp_path / "in" / records.names[label]).iterdir()}
        assert records.read(image)[1].tobytes() in of_name
    assert rec_info.main(["--input", str(tmp_path / "out")]) == 0
    assert re.search(r'  \d: Zoë, the "first" \(1\)\n', capsys.readouterr().out)


def test_labels_stay_when_people_come_and_go(tmp_path, picture, capsys):
    for name in ("bo", "cy", "di"):
        save(tmp_path / f"in/{name}/1.jpg", picture())
    arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert dir2rec.main(arguments) == 0
    assert Records(tmp_path / "out").names == {0: "bo", 1: "cy", 2: "di"}
    shutil.rmtree(tmp_path / "in/di")
    save(tmp_path / "in/ann/1.jpg", picture())
    save(tmp_path / "in/bo/2.jpg", picture())
    (tmp_path / "in/al").mkdir()
    (tmp_path / "in/al/broken.jpg").write_bytes(b"no image")
    capsys.readouterr()
    assert dir2rec.main([*arguments, "--overwrite"]) == 0
    assert "2 identities kept their labels, 1 are new" in capsys.readouterr().out
    records = Records(tmp_path / "out")
    assert records.names == {0: "bo", 1: "cy", 2: "di", 3: "ann"}
    assert records.labels.tolist() == [0, 0, 1, 3]
    assert records.property.num_classes == 4
    assert records.read(3)[1].tobytes() == (tmp_path / "in/ann/1.jpg").read_bytes()
    # In another folder, the file decides alone.
    (tmp_path / "new").mkdir()
    shutil.copy(tmp_path / "out/identities.csv", tmp_path / "new")
    arguments[-1] = str(tmp_path / "new")
    assert dir2rec.main(arguments) == 0
    assert (tmp_path / "new/train.rec").read_bytes() == (tmp_path / "out/train.rec").read_bytes()


def test_folders_with_digits_are_names_in_a_list_of_landmarks(tmp_path, picture):
    points = " ".join(f"{number}" for number in ARCFACE_TEMPLATE.ravel())
    lines = []
    for name in ("0007", "0045"):
        save(tmp_path / f"in/{name}/1.jpg", picture(112, 112))
        lines.append(f"{name}/1.jpg 0 0 112 112 {points}\n")
    (tmp_path / "label.txt").write_text("".join(lines))
    arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert dir2rec.main([*arguments, "--list", str(tmp_path / "label.txt")]) == 0
    records = Records(tmp_path / "out")
    assert records.labels.tolist() == [0, 1]
    assert records.names == {0: "0007", 1: "0045"}


def test_folder_of_insightface(tmp_path, picture):
    photo = save(tmp_path / "images/zoe/1.png", picture(200, 160))
    points = ARCFACE_TEMPLATE * 1.2 + (10, 20)
    (tmp_path / "label.txt").write_text(f"zoe/1.png 1 2 3 4 {' '.join(map(str, points.ravel()))}\n")
    assert dir2rec.main(["--input", str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    records = Records(tmp_path / "out")
    assert records.names == {0: "zoe"}
    aligned = align(photo, points, (112, 112))
    assert np.abs(decode(records.read(0)[1]).astype(int) - aligned).mean() < 5


def test_maps_that_do_not_fit(tmp_path, picture, capsys):
    save(tmp_path / "in/ann/1.jpg", picture())
    (tmp_path / "list").write_text("ann/1.jpg 3\n")
    arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    (tmp_path / "out").mkdir()
    for content, message in (
        ("label,name\nx²,ann\n", "line 2: the label of 'ann' must be a whole number"),
        ("label,name\n1,ann\n1,bo\n", "line 3: the label of 'bo' must be a whole number"),
        ("label,name\n1,ann\n2,ann\n", "'ann' has the labels 1 and 2"),
    ):
        (tmp_path / "out/identities.csv").write_text(content)
        assert dir2rec.main(arguments) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "out/identities.csv").write_text("label,name\n1,ann\n")
    assert dir2rec.main([*arguments, "--list", str(tmp_path / "list")]) == 2
    assert "this list has labels of its own" in capsys.readouterr().err
    assert not (tmp_path / "out/train.rec").exists()


def test_what_is_skipped_is_counted_and_named(tmp_path, picture, capsys):
    for name in (
        "ann/1.jpg",
        "ann/.thumbnails/1.jpg",
        "ann/.hidden.jpg",
        ".git/1.jpg",
        "stray.jpg",
    ):
        save(tmp_path / "in" / name, picture())
    for name in ("ann/notes.txt", "ann/film.mp4", "ann/raw.HEIC", "readme.md"):
        (tmp_path / "in" / name).write_text("no image")
    arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert dir2rec.main(arguments) == 0
    out = capsys.readouterr().out
    assert "1 images of 1 identities" in out
    assert "hidden files and folders skipped: 3\n" in out
    assert re.search(r"files skipped, as they are not \.jpg.*: 5\n", out)
    assert "ann/film.mp4\n" in out
    assert "... and 2 more" in out
    assert Records(tmp_path / "out").names == {0: "ann"}


def test_whole_photographs_are_told(tmp_path, picture, capsys):
    save(tmp_path / "in/ann/1.jpg", picture())
    arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--overwrite"]
    assert dir2rec.main(arguments) == 0
    assert "Warning" not in capsys.readouterr().out
    save(tmp_path / "in/ann/2.jpg", picture(300, 400))
    save(tmp_path / "in/ann/3.jpg", picture(400, 300))
    assert dir2rec.main(arguments) == 0
    out = capsys.readouterr().out
    assert "Warning: 2 images were not 112x112 and came without landmarks" in out
    assert "ann/2.jpg (300x400)\n" in out
    assert "ann/3.jpg (400x300)\nA face recogniser wants aligned faces" in out
    landmarks = " ".join(f"{value:.2f}" for value in (ARCFACE_TEMPLATE * 2).ravel())
    (tmp_path / "list").write_text(f"ann/2.jpg ann {landmarks}\n")
    assert dir2rec.main([*arguments, "--list", str(tmp_path / "list")]) == 0
    assert "Warning" not in capsys.readouterr().out


def test_round_trip_with_rec2dir(dataset, tmp_path):
    folder, _ = dataset(counts=(3, 12, 1, 2))
    assert rec2dir.main(["--input", str(folder), "--output", str(tmp_path / "files")]) == 0
    assert sorted(file.name for file in (tmp_path / "files").iterdir()) == list("0123")
    again = ["--input", str(tmp_path / "files"), "--output", str(tmp_path / "again")]
    assert dir2rec.main([*again, "--image-size", "32"]) == 0
    for name in ("train.rec", "train.idx", "property"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_other_sizes_are_fitted(tmp_path, picture):
    save(tmp_path / "in/p/a.png", picture(200, 150))
    arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert dir2rec.main([*arguments, "--image-size", "112,96", "--encoding", ".png"]) == 0
    records = Records(tmp_path / "out")
    assert records.property == (1, 112, 96)
    assert decode(records.read(0)[1]).shape == (112, 96, 3)


def test_list_with_names_numbers_and_landmarks(tmp_path, picture):
    for name in "abc":
        save(tmp_path / f"{name}.png", picture(300, 300))
    turned = ARCFACE_TEMPLATE[:, ::-1] + 30
    numbers = " ".join(f"{value:.4f}" for value in turned.ravel())
    (tmp_path / "named.txt").write_text(f"a.png zoe\nb.png adam {numbers}\nc.png zoe\n")
    sources = folders.read_list(tmp_path / "named.txt", tmp_path)
    summary = folders.build(sources, tmp_path / "named", extension=".png")
    assert (summary.images, summary.identities, summary.aligned) == (3, 2, 1)
    records = Records(tmp_path / "named")
    assert records.labels.tolist() == [0, 1, 1]
    expected = align(cv2.imread(str(tmp_path / "b.png")), turned, (112, 112))
    assert np.abs(decode(records.read(0)[1]).astype(int) - expected).max() <= 1

    (tmp_path / "numbered.csv").write_text("a.png,7\nb.png,3\nc.png,7\n")
    folders.build(folders.read_list(tmp_path / "numbered.csv", tmp_path), tmp_path / "numbered")
    assert Records(tmp_path / "numbered").labels.tolist() == [3, 7, 7]


def test_insightface_lst(tmp_path, picture):
    landmarks = ARCFACE_TEMPLATE * 2 + 5
    box = "0\t0\t9\t9"
    xs, ys = ("\t".join(f"{value:.4f}" for value in axis) for axis in landmarks.T)
    save(tmp_path / "my face.png", picture(300, 300))
    save(tmp_path / "b.png", picture())
    (tmp_path / "train.lst").write_text(f"0\tmy face.png\t5\t{box}\t{xs}\t{ys}\n1\tb.png\t4\n")
    sources = folders.read_list(tmp_path / "train.lst", tmp_path)
    np.testing.assert_allclose(sources[0].landmarks, landmarks, atol=1e-4)
    assert sources[1].landmarks is None
    assert [source.identity for source in sources] == [5, 4]
    (tmp_path / "train.lst").write_text(f"0\tmy face.png\t5\t{box}\n")
    with pytest.raises(ValueError, match="line 1: an image that is not aligned needs"):
        folders.read_list(tmp_path / "train.lst", tmp_path)


def test_im2rec_lst(tmp_path):
    (tmp_path / "train.lst").write_text("0\t2.000000\ta/b.jpg\n1\t0.000000\tc.jpg\n")
    sources = folders.read_list(tmp_path / "train.lst", "root")
    assert [(source.path, source.identity) for source in sources] == [
        ("root/a/b.jpg", 2),
        ("root/c.jpg", 0),
    ]


def test_unreadable_images_are_left_out_and_told(tmp_path, picture, capsys):
    save(tmp_path / "in/a/1.jpg", picture())
    save(tmp_path / "in/c/1.jpg", picture())
    (tmp_path / "in/b").mkdir()
    (tmp_path / "in/b/broken.jpg").write_bytes(b"\xff\xd8 no image")
    (tmp_path / "in/c/cut.jpg").write_bytes((tmp_path / "in/c/1.jpg").read_bytes()[:-40])
    arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert dir2rec.main(arguments) == 0
    output = capsys.readouterr().out
    assert "2 images of 2 identities" in output
    assert "2 images could not be read" in output
    assert "b/broken.jpg: the JPEG has no end marker" in output
    # b has no image left; no label stays empty for it
    assert Records(tmp_path / "out").labels.tolist() == [0, 1]


def test_small_identities_can_be_left_out(tmp_path, picture, capsys):
    for name in ("a/1", "b/1", "b/2"):
        save(tmp_path / f"in/{name}.jpg", picture())
    arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert dir2rec.main([*arguments, "--min-images", "2"]) == 0
    assert "1 identities had fewer than 2 images" in capsys.readouterr().out
    assert len(Records(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a.jpg\n", r"line 1: it has no label"),
        ("a.jpg 1\nb.jpg 1 2 3\n", r"line 2: 4 fields"),
        ("a.jpg 1 " + "x " * 10, r"line 1: could not convert"),
        ("\n", "the file is empty"),
    ],
)
def test_bad_lists(tmp_path, content, message):
    (tmp_path / "list").write_text(content)
    with pytest.raises(ValueError, match=message):
        folders.read_list(tmp_path / "list", tmp_path)


def test_bad_arguments(tmp_path, picture, capsys, dataset):
    (tmp_path / "in").mkdir()
    arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert dir2rec.main(arguments) == 2
    assert "no images in it" in capsys.readouterr().err
    save(tmp_path / "in/a/1.jpg", picture())
    assert dir2rec.main([*arguments, "--min-images", "3"]) == 2
    assert "no identity has 3 images" in capsys.readouterr().err
    arguments[-1] = str(dataset()[0])
    assert dir2rec.main(arguments) == 2
    assert "exists" in capsys.readouterr().err
    assert dir2rec.main([*arguments, "--overwrite"]) == 0
    with pytest.raises(SystemExit):
        dir2rec.main([*arguments, "--image-size", "big"])
    assert "height,width like 112,112, not 'big'" in capsys.readouterr().err
    assert dir2rec.main(["--input", "/nowhere", "--output", str(tmp_path / "x")]) == 2
    assert "/nowhere" in capsys.readouterr().err


def test_threads_change_nothing(tmp_path, picture):
    for number in range(30):
        save(tmp_path / f"in/{number % 7}/{number}.jpg", picture(100, 120))
    for threads in ("1", "5"):
        arguments = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / threads)]
        assert dir2rec.main([*arguments, "--threads", threads]) == 0
    assert (tmp_path / "1/train.rec").read_bytes() == (tmp_path / "5/train.rec").read_bytes()
