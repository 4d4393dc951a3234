"""From photographs to faces, with a detector of red squares."""

import json
import os
import re

import cv2
import numpy as np
import pytest
from detectors import marker_photo, marker_scrfd

from dsoftmax.eval import verification
from dsoftmax.recognition.data import photographs
from dsoftmax.recognition.data.detection import FaceFinder
from dsoftmax.recognition.data.folders import read_list
from dsoftmax.recognition.data.identities import read_table
from dsoftmax.recognition.data.images import align as warp
from dsoftmax.recognition.data.images import decode
from dsoftmax.recognition.data.packs import read_pack
from dsoftmax.recognition.data.records import Records
from dsoftmax.tools import align, compare, dir2rec, embed, pairs2bin, search

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cv2.imencode(path.suffix, image)[1].tobytes())


def read(path):
    return decode(np.fromfile(path, np.uint8))


@pytest.fixture
def photos(tmp_path):
    """Write photographs of 192×192; return their folder and their landmarks by name."""
    landmarks = {}
    for name, cells in {
        "ann/1.png": [(2, 2)],
        "ann/2.png": [(4, 3)],
        "ann/party/3.png": [(1, 4), (4, 4)],
        "bo/1.png": [(3, 3)],
        "bo/2.bmp": [(2, 4)],
        "stray.png": [(3, 2)],
    }.items():
        image, landmarks[name] = marker_photo(cells, factor=3)
        save(tmp_path / "photos" / name, image)
    save(tmp_path / "photos/bo/wall.png", marker_photo([], factor=3)[0])
    (tmp_path / "photos/bo/broken.jpg").write_bytes(b"\xff\xd8 no image")
    (tmp_path / "photos/bo/notes.txt").write_text("no image")
    return tmp_path / "photos", landmarks


@pytest.fixture
def run(tmp_path, photos):
    """Run the command; return its folder."""
    detector = marker_scrfd(tmp_path / "detector.onnx")

    def run_command(*flags, output="faces", code=0):
        folder = tmp_path / output
        arguments = ["--detector", detector, "--input", str(photos[0]), "--output", str(folder)]
        assert align.main([*arguments, *flags]) == code
        return folder

    return run_command


def files_in(folder):
    """Return the content of all files below a folder but the settings, which name the input."""
    return {
        os.path.relpath(os.path.join(where, name), folder): open_bytes(os.path.join(where, name))
        for where, _, names in os.walk(folder)
        for name in names
        if name != photographs.SETTINGS
    }


def open_bytes(path):
    with open(path, "rb") as file:
        return file.read()


def test_photographs_become_faces(run, photos, capsys):
    folder, landmarks = photos
    faces = run()
    out = capsys.readouterr().out
    assert "6 faces of 8 photographs" in out
    assert "1 photographs show several faces, the largest was taken" in out
    assert "1 photographs without a face:\n  bo/wall.png: no face with a score of 0.5" in out
    assert "1 photographs could not be read:\n  bo/broken.jpg: the JPEG has no end" in out
    assert re.search(r"files skipped, as they are not \.jpg.*: 1\n", out)
    rows = {row["source"]: row for row in read_table(faces / "faces.csv")}
    assert set(rows) == {*landmarks, "bo/wall.png", "bo/broken.jpg"}
    assert [rows[name]["reason"][:7] for name in ("bo/wall.png", "bo/broken.jpg")] == [
        "no face",
        "the JPE",
    ]
    for name, points in landmarks.items():
        row = rows[name]
        assert (row["output"], row["faces"]) == (name, str(len(points)))
        found = [[float(row[f"{axis}{point}"]) for axis in "xy"] for point in range(1, 6)]
        assert min(np.abs(found - one).max() for one in points) < 0.01
        expected = warp(read(folder / name), np.array(found), (112, 112))
        np.testing.assert_allclose(read(faces / name).astype(int), expected, atol=2)
    assert min(read(faces / "sheet.png").shape[:2]) > 112


def test_label_txt_packs_the_photographs(run, photos, tmp_path):
    """dir2rec aligns the photographs by the list as `align` did, and --detector does so at once."""
    os.unlink(photos[0] / "stray.png")
    faces = run()
    sources = read_list(faces / "label.txt", str(photos[0]))
    assert sorted({source.identity for source in sources}) == ["ann", "bo"]
    common = ["--encoding", ".png"]
    for name, arguments in {
        "aligned": ["--input", str(faces)],
        "listed": ["--input", str(photos[0]), "--list", str(faces / "label.txt")],
        "detected": ["--input", str(photos[0]), "--detector", str(tmp_path / "detector.onnx")],
    }.items():
        assert dir2rec.main([*arguments, "--output", str(tmp_path / name), *common]) == 0
    records = [Records(tmp_path / name) for name in ("aligned", "listed", "detected")]
    assert [len(one) for one in records] == [5, 5, 5]
    for image in range(5):
        pixels = [decode(one.read(image)[1]).astype(int) for one in records]
        np.testing.assert_allclose(pixels[1], pixels[0], atol=2)
        np.testing.assert_array_equal(pixels[2], pixels[0])


def test_dir2rec_and_pairs2bin_tell_what_has_no_face(photos, tmp_path, capsys):
    folder, _ = photos
    detector = marker_scrfd(tmp_path / "detector.onnx")
    aligned = np.full((112, 112, 3), 50, np.uint8)  # no marker in it
    save(folder / "cy/aligned.png", aligned)
    save(folder / "cy/2.png", marker_photo([(2, 3)], factor=3)[0])
    arguments = ["--input", str(folder), "--output", str(tmp_path / "rec"), "--detector", detector]
    assert dir2rec.main([*arguments, "--encoding", ".png"]) == 0
    out = capsys.readouterr().out
    assert "7 images of 3 identities" in out
    assert "(6 aligned by their landmarks)" in out
    assert "1 photographs were left out, no face was found in them:\n" in out
    assert "wall.png: no face with a score" in out
    assert "Warning" not in out
    kept = [decode(Records(tmp_path / "rec").read(image)[1]) for image in range(7)]
    assert any((image == aligned).all() for image in kept)  # it has the size already

    lines = ["ann/1.png ann/2.png 1", "ann/1.png bo/1.png 0", "ann/1.png bo/wall.png 0"]
    (tmp_path / "pairs").write_text("\n".join(lines))
    output = str(tmp_path / "own.bin")
    arguments = ["--data-dir", str(folder), "--pairs", str(tmp_path / "pairs"), "--output", output]
    assert pairs2bin.main([*arguments, "--detector", detector]) == 0
    out = capsys.readouterr().out
    assert "2 of 3 pairs" in out
    assert "bo/wall.png: no face with a score of 0.5 or more\n" in out
    assert "Warning" not in out
    pack = read_pack(output)
    assert pack.images[0].tobytes() == pack.images[2].tobytes()
    assert pairs2bin.main(arguments) == 0
    assert "find the faces by --detector" in capsys.readouterr().out


def test_verification_of_people_on_photographs(photos, tmp_path, symbol_model, capsys):
    folder, _ = photos
    (folder / "bo/broken.jpg").unlink()
    detector = marker_scrfd(tmp_path / "detector.onnx")
    arguments = ["--model", f"{symbol_model()},0", "--gpu", "-1", "--nfolds", "2"]
    people = ["--people", str(folder), "--most", "8"]
    assert verification.main([*arguments, *people, "--detector", detector]) == 0
    printed = capsys.readouterr()
    assert "[photos]Accuracy-Flip: " in printed.out
    assert "bo/wall.png: no face with a score of 0.5" in printed.err
    assert "Warning" not in printed.err
    assert verification.main([*arguments, *people]) == 0
    printed = capsys.readouterr()
    assert "Warning: 6 images were not 112x112" in printed.err
    assert "find the faces by --detector, or align them first." in printed.err
    assert verification.main([*arguments, "--data-dir", "x", "--detector", detector]) == 2
    assert "give --pairs or --people, too" in capsys.readouterr().err


def test_each_photograph_is_searched_once(photos, tmp_path, monkeypatch):
    """However many pairs it is in."""
    searched = []
    find = FaceFinder.find
    monkeypatch.setattr(
        FaceFinder, "find", lambda self, image: searched.append(1) or find(self, image)
    )
    names = ["ann/1.png", "ann/2.png", "bo/1.png", "bo/2.bmp"]
    lines = [f"{one} {other} {int(one[0] == other[0])}" for one in names for other in names]
    (tmp_path / "pairs").write_text("\n".join(lines))
    arguments = ["--data-dir", str(photos[0]), "--pairs", str(tmp_path / "pairs")]
    arguments += ["--output", str(tmp_path / "a.bin")]
    arguments += ["--detector", marker_scrfd(tmp_path / "detector.onnx")]
    assert pairs2bin.main(arguments) == 0
    assert len(searched) == len(names)


def test_a_run_goes_on_where_it_was_killed(run, photos, monkeypatch, capsys):
    """Half a row, a face without a row and a row without a face are done again, nothing else."""
    whole = files_in(run())
    faces = run(output="again")
    assert files_in(faces) == whole
    table = (faces / "faces.csv").read_text().splitlines(keepends=True)
    cut = [line for line in table if not line.startswith("bo/1.png")]
    (faces / "faces.csv").write_text("".join(cut[:-1]) + cut[-1][: len(cut[-1]) // 2])
    (faces / "ann/2.png").unlink()
    (faces / "ann/.1.png.99999999.part").write_bytes(b"half")
    for name in ("label.txt", "sheet.png"):
        (faces / name).unlink()
    worked = []
    real = photographs._align_one
    monkeypatch.setattr(
        photographs, "_align_one", lambda path, *rest: worked.append(path) or real(path, *rest)
    )
    last = cut[-1].partition(",")[0]
    capsys.readouterr()
    run(output="again")
    # Photographs without a face are tried again, too.
    assert set(worked) == {"bo/1.png", last, "ann/2.png", "bo/wall.png", "bo/broken.jpg"}
    assert files_in(faces) == whole
    assert "of them by an earlier run" in capsys.readouterr().out


def test_changed_new_and_lost_photographs(run, photos, capsys):
    folder, _ = photos
    faces = run()
    before = (faces / "ann/1.png").read_bytes()
    save(folder / "ann/1.png", marker_photo([(5, 5)], colour=(20, 180, 30), factor=3)[0])
    os.utime(folder / "ann/1.png", (2e9, 2e9))
    save(folder / "di/1.png", marker_photo([(3, 3)], factor=3)[0])
    (folder / "bo/1.png").unlink()
    capsys.readouterr()
    run()
    out = capsys.readouterr().out
    assert "1 faces are there whose photographs are gone:\n  bo/1.png" in out
    assert (faces / "ann/1.png").read_bytes() != before
    assert (faces / "di/1.png").exists()
    assert "bo/1.png" not in (faces / "label.txt").read_text()


def test_photographs_are_turned_as_exif_says(tmp_path, run, photos):
    """A phone stores a picture lying on its side, and how to turn it."""
    from PIL import Image

    upright, _ = marker_photo([(2, 5)], (64, 48), factor=4)
    lying = np.ascontiguousarray(np.rot90(upright))  # orientation 6 turns it clockwise
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(lying[:, :, ::-1]).save(photos[0] / "ann/phone.jpg", exif=exif, quality=100)
    Image.fromarray(upright[:, :, ::-1]).save(photos[0] / "ann/plain.jpg", quality=100)
    faces = run()
    rows = {row["source"]: row for row in read_table(faces / "faces.csv")}
    turned, plain = rows["ann/phone.jpg"], rows["ann/plain.jpg"]
    assert [turned[f"x{point}"] for point in range(1, 6)] == [
        plain[f"x{point}"] for point in range(1, 6)
    ]
    difference = read(faces / "ann/phone.jpg").astype(int) - read(faces / "ann/plain.jpg")
    assert np.abs(difference).mean() < 2


def test_the_face_in_the_middle(run, photos):
    for name, cells in (("one", [(1, 1), (3, 3)]), ("other", [(3, 3), (6, 5)])):
        save(photos[0] / f"ann/{name}.png", marker_photo(cells, factor=3)[0])
    rows = {row["source"]: row for row in read_table(run("--face", "central") / "faces.csv")}
    for name in ("one", "other"):
        row = rows[f"ann/{name}.png"]
        assert row["faces"] == "2"
        assert abs(float(row["x1"]) - 3 * 24) < 0.01


def test_threads_and_json(run, tmp_path, capsys):
    one, four = run("--threads", "1"), run("--threads", "4", output="four")
    assert files_in(one) == files_in(four)
    capsys.readouterr()
    run("--json", output="json")
    summary = json.loads(capsys.readouterr().out)
    assert (summary["photographs"], summary["aligned"], summary["several"]) == (8, 6, 1)
    assert len(summary["faceless"]) == len(summary["unreadable"]) == 1


def test_what_is_refused(run, photos, tmp_path, capsys):
    folder, _ = photos
    inside = os.path.join("photos", "faces")
    for output in (inside, "photos"):
        run(output=output, code=2)
        assert "choose a folder beside it" in capsys.readouterr().err
    run()
    run("--image-size", "96", code=2)
    assert "was made with another image_size" in capsys.readouterr().err
    run("--min-score", "0.8", "--face", "central", code=2)
    assert "was made with another min_score and face" in capsys.readouterr().err
    run("--min-score", "3", code=2)
    assert "between 0 and 1, not 3" in capsys.readouterr().err
    (tmp_path / "others").mkdir()
    (tmp_path / "others/mine.txt").write_text("keep me")
    run(output="others", code=2)
    assert "holds other files" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    arguments = ["--detector", str(tmp_path / "detector.onnx"), "--output", str(tmp_path / "x")]
    assert align.main(["--input", str(tmp_path / "empty"), *arguments]) == 2
    assert "no images in it; it must hold .jpg" in capsys.readouterr().err
    assert align.main(["--input", str(tmp_path / "nowhere"), *arguments]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    arguments[1] = str(folder / "ann/1.png")
    assert align.main(["--input", str(folder), *arguments]) == 2
    assert "1.png is no ONNX file" in capsys.readouterr().err


def test_embed_compare_and_search_find_faces(photos, tmp_path, symbol_model, capsys):
    """The embeddings are those of the aligned faces, whichever command makes them."""
    folder, _ = photos
    for name in ("bo/broken.jpg", "stray.png"):
        (folder / name).unlink()
    detector = ["--detector", marker_scrfd(tmp_path / "detector.onnx")]
    faces = tmp_path / "faces"
    assert align.main(["--input", str(folder), "--output", str(faces), *detector]) == 0
    model = ["--model", f"{symbol_model()},0", "--gpu", "-1", "--image-size", "112"]
    rows = {}
    for source, flags in ((folder, detector), (faces / "label.txt", ["--data-dir", str(folder)])):
        output = tmp_path / f"{source.name}.npy"
        arguments = ["--input", str(source), "--output", str(output), *flags]
        assert embed.main([*model, *arguments]) == 0
        rows[source.name] = np.load(output)
    err = capsys.readouterr().err
    assert "bo/wall.png: no face with a score of 0.5 or more" in err
    assert "Warning" not in err
    found = rows["photos"][np.abs(rows["photos"]).sum(axis=1) > 0]
    assert len(found) == len(rows["label.txt"]) == 5
    np.testing.assert_allclose(found, rows["label.txt"], rtol=1e-2, atol=1e-2)

    pair = [str(folder / "ann/1.png"), str(folder / "ann/2.png")]
    assert compare.main([*pair, *model, *detector, "--plot", str(tmp_path / "two.png")]) == 0
    printed = capsys.readouterr()
    assert "Warning" not in printed.err
    cosine = float(printed.out.split()[1])
    assert compare.main([*pair, *model]) == 0
    printed = capsys.readouterr()
    assert "find the faces by --detector" in printed.err
    assert float(printed.out.split()[1]) != cosine
    assert compare.main([pair[0], str(folder / "bo/wall.png"), *model, *detector]) == 2
    assert "wall.png: no face with a score" in capsys.readouterr().err

    gallery = ["--output", str(tmp_path / "gallery"), "--input", str(folder)]
    assert search.main(["build", *model, *gallery, *detector]) == 0
    query = ["query", "--gallery", str(tmp_path / "gallery"), pair[0], "--gpu", "-1", *detector]
    assert search.main([*query, "--plot", str(tmp_path / "found.png")]) == 0
    printed = capsys.readouterr()
    assert "has 5 images of 2 people" in printed.out
    assert f"  1.0000  ann  {pair[0]}" in printed.out
    drawn = read(tmp_path / "found.png")
    assert drawn.shape[0] > 112
