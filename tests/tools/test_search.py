"""The command search: build, add, query."""

import json
import shutil

import cv2
import pytest

from dsoftmax.tools import search


@pytest.fixture
def people(tmp_path, jpeg):
    for name in ("ann/1", "ann/2", "bo/1", "cy/1", "cy/2"):
        path = tmp_path / "people" / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg())
    return tmp_path / "people"


@pytest.fixture
def gallery(people, symbol_model, tmp_path, capsys):
    flags = ["--model", f"{symbol_model(scale=3.0)},0", "--image-size", "32"]
    folder = str(tmp_path / "gallery")
    assert search.main(["build", "--input", str(people), "--output", folder, *flags]) == 0
    out = capsys.readouterr().out
    assert out == f"5 images were added; {folder} has 5 images of 3 people, as int8\n"
    return folder


def test_people_are_found(gallery, people, tmp_path, capsys):
    photos = [str(people / "bo/1.jpg"), str(people / "cy/2.jpg")]
    sheet = str(tmp_path / "sheet.png")
    flags = ["--gallery", gallery, "--top", "2", "--plot", sheet]
    assert search.main(["query", *photos, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == photos[0]
    cosine, person, path = lines[1].split()
    assert (person, path) == ("bo", photos[0])
    assert float(cosine) == pytest.approx(1, abs=0.01)
    assert lines[3] == photos[1]
    assert lines[4].split()[1:] == ["cy", photos[1]]
    assert lines[6].startswith("searched 5 images of 3 people in ")
    assert cv2.imread(sheet).shape[0] > 2 * 112
    assert search.main(["query", *photos, "--gallery", gallery, "--threshold", "0.9999999"]) == 0
    assert f"{photos[0]}: nobody has a higher cosine" in capsys.readouterr().out
    assert search.main(["query", photos[0], "--gallery", gallery, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (query,) = report["queries"]
    assert query["people"][0]["person"] == "bo"
    assert {match["person"]: match["images"] for match in query["people"]} == {
        "ann": 2, "bo": 1, "cy": 2
    }  # fmt: skip


def test_adding(gallery, people, tmp_path, jpeg, capsys):
    (people / "dee").mkdir()
    (people / "dee/1.jpg").write_bytes(jpeg(50, 50))
    (people / "dee/2.jpg").write_bytes(b"nothing")
    assert search.main(["add", "--gallery", gallery, "--input", str(people)]) == 0
    out, err = capsys.readouterr()
    assert "1 images were added, 5 were there already; " in out
    assert "has 6 images of 4 people" in out
    assert "Warning: 1 images were not 32x32" in err
    assert f"1 images can't be used:\n  {people}/dee/2.jpg: 7 bytes" in err
    assert (
        search.main(["query", str(people / "dee/1.jpg"), "--gallery", gallery, "--top", "1"]) == 0
    )
    assert " dee  " in capsys.readouterr().out
    shutil.rmtree(people / "dee")
    assert search.main(["add", "--gallery", gallery, "--input", str(people), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["added"], report["known"], report["images"]) == (0, 5, 6)


def test_mistakes_of_users(gallery, people, tmp_path, symbol_model, capsys):
    photo = str(people / "bo/1.jpg")
    (tmp_path / "bad.jpg").write_bytes(b"nothing")
    other = f"{symbol_model('other')},0"
    query = ["query", "--gallery", gallery]
    for arguments, message in (
        ([*query, photo, "--model", other], "is another model"),
        ([*query, photo, "--top", "0"], "--top must be a whole number, 1 or more"),
        ([*query, str(tmp_path / "bad.jpg")], "none of the photographs can be used"),
        (["query", photo, "--gallery", str(tmp_path)], "build a gallery first"),
        (["build", "--input", str(people), "--output", gallery, "--model", other, "--image-size",
          "32"], "is a gallery already"),
        (["build", "--input", str(tmp_path / "gallery"), "--output", "x", "--model", other],
         "or give a list\n"),
    ):  # fmt: skip
        assert search.main(arguments) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        search.main(["query", photo])
    assert "--gallery" in capsys.readouterr().err
