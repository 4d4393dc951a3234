"""A dataset and the flags of a short run, for jobs of many processes."""

import cv2
import numpy as np
import pytest

from dsoftmax.recognition.data.records import RecordWriter
from tests.conftest import make_image


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    """Write a dataset of 12 identities."""
    folder = tmp_path_factory.mktemp("job") / "faces"
    draw = np.random.default_rng(1)
    with RecordWriter(folder, image_size=(32, 32)) as writer:
        for label in range(12):
            for _ in range(8):
                writer.add(label, cv2.imencode(".jpg", make_image(draw))[1].tobytes())
    return folder


@pytest.fixture
def flags(faces, tmp_path):
    """Return the flags of a short run."""

    def make(name, *more):
        common = "--network tiny --dataset few --target none --emb-size 16 --per-batch-size 8"
        numbers = "--lr-steps 7 --max-steps 10 --verbose 5 --frequent 5 --threads 1 --seed 5"
        folders = ["--data-dir", faces, "--models-root", tmp_path / name]
        return [*map(str, [*common.split(), *numbers.split(), *folders, *more])]

    return make
