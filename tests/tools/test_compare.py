"""The command compare, with and without a calibration."""

import json
import re

import cv2
import numpy as np
import pytest

from dsoftmax.eval import verification
from dsoftmax.eval.embed import embed_images
from dsoftmax.eval.models import load_model
from dsoftmax.recognition.data.packs import write_pack
from dsoftmax.tools import compare


@pytest.fixture
def photos(tmp_path, jpeg):
    for name in "abc":
        (tmp_path / f"{name}.jpg").write_bytes(jpeg())
    return [str(tmp_path / f"{name}.jpg") for name in "abc"]


@pytest.fixture
def model(symbol_model):
    return f"{symbol_model(scale=3.0)},0"


def run(model, photos, *flags):
    return compare.main([*photos, "--model", model, "--image-size", "32", *flags])


def test_two_images(model, photos, tmp_path, capsys):
    a, b = embed_images(load_model(model), photos[:2], size=(32, 32)).astype(float)
    assert run(model, photos[:2]) == 0
    out = capsys.readouterr().out
    assert out == f"cosine {a @ b:.4f}\nno verdict without a --threshold or a --calibration\n"
    for threshold, verdict in ((a @ b - 0.01, "one person"), (a @ b + 0.01, "two people")):
        picture = str(tmp_path / "two.png")
        assert run(model, photos[:2], "--threshold", str(threshold), "--plot", picture) == 0
        out = capsys.readouterr().out
        assert out == f"cosine {a @ b:.4f}: {verdict}\nthreshold {threshold:.4f}\n"
        assert cv2.imread(picture).shape[1] > 2 * 112


def test_a_calibration(model, photos, tmp_path, jpeg, capsys):
    write_pack(str(tmp_path / "own.bin"), [jpeg() for _ in range(400)], [True, False] * 100)
    results = str(tmp_path / "results.json")
    flags = ["--data-dir", str(tmp_path), "--model", model, "--json", results]
    assert verification.main([*flags, "--calibrate", "0.5,0.1"]) == 0
    capsys.readouterr()
    assert run(model, photos[:2], "--calibration", results, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["threshold"]["far"] == 0.1
    (pair,) = report["pairs"]
    assert 0 < pair["false_accept_rate"] <= 1
    assert pair["is_same"] == (pair["cosine"] > report["threshold"]["cosine"])
    assert run(model, photos[:2], "--calibration", results, "--far", "0.5") == 0
    out = capsys.readouterr().out
    assert re.search(
        r"^(at most [\d.]+ %|all|none) of the 100 pairs of different people in own ",
        out,
        re.MULTILINE,
    )
    assert re.search(r"threshold -?[\d.]+, false accept rate 0.5$", out, re.MULTILINE)


def test_the_matrix(model, photos, tmp_path, capsys):
    vectors = embed_images(load_model(model), photos, size=(32, 32)).astype(float)
    picture = str(tmp_path / "all.png")
    assert run(model, photos, "--threshold", "-1", "--plot", picture) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4:] == ["* one person", "threshold -1.0000"]
    cosines = vectors @ vectors.T
    for row, line in enumerate(lines[1:4]):
        others = [cosines[row, column] for column in range(3) if column != row]
        assert line.split()[2:] == [f"{cosine:.3f}*" for cosine in others]
    assert cv2.imread(picture).shape[0] > 4 * 112
    assert np.ptp(cosines) > 1e-3  # the pictures do differ


def test_mistakes_of_users(model, photos, tmp_path, jpeg, capsys, symbol_model):
    (tmp_path / "bad.jpg").write_bytes(b"nothing")
    (tmp_path / "large.jpg").write_bytes(jpeg(60, 70))
    for given, flags, message in (
        (photos[:1], [], "takes two images or more"),
        ([photos[0], str(tmp_path / "bad.jpg")], [], "bad.jpg: 7 bytes are no image"),
        ([photos[0], "none.jpg"], [], "none.jpg: there is no such file"),
        (photos, ["--far", "0.1"], "--far needs a --calibration"),
        (photos, ["--calibration", photos[0]], "not a file that eval/verification.py wrote"),
        (photos, ["--plot", "x.gif"], "a picture is a .png or a .jpg"),
    ):
        assert run(model, given, *flags) == 2
        assert message in capsys.readouterr().err
    assert run(model, [photos[0], str(tmp_path / "large.jpg")]) == 0
    assert "Warning: 1 images were not 32x32" in capsys.readouterr().err
