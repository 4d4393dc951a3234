"""Datasets and flags of runs that take a moment."""

import pytest

from dsoftmax.recognition.data.packs import write_pack
from dsoftmax.recognition.log import RunLog
from dsoftmax.recognition.report import RunReport
from tests.recognition.runs import COUNTS


@pytest.fixture
def faces(dataset, jpeg):
    """Write a small dataset with a pack; return its folder."""
    folder, _ = dataset(COUNTS)
    write_pack(folder / "val.bin", [jpeg() for _ in range(40)], [True, False] * 10)
    return folder


@pytest.fixture
def draws_curves():
    """Say whether runs draw ``curves.png``; most tests would spend most of their time on that."""
    return False


@pytest.fixture
def writes_report():
    """Say whether runs write ``report.html``, which takes longer than they do."""
    return False


@pytest.fixture
def flags(faces, tmp_path, monkeypatch, draws_curves, writes_report):
    """Return a function that makes the flags of a short run; a flag of None is left out."""
    if not draws_curves:
        monkeypatch.setattr(RunLog, "draw", lambda *_, **__: None)
    if not writes_report:
        monkeypatch.setattr(RunReport, "write", lambda *_, **__: None)

    def make(name="models", **changes):
        options = {
            "network": "tiny",
            "loss": "dsoftmax",
            "dataset": "few",
            "data-dir": faces,
            "target": "val",
            "emb-size": 8,
            "per-batch-size": 8,
            "lr-steps": "9",
            "max-steps": 12,
            "verbose": 4,
            "frequent": 2,
            "threads": 1,
            "devices": "cpu",
            "seed": 5,
            "models-root": tmp_path / name,
        }
        options.update({key.replace("_", "-"): value for key, value in changes.items()})
        made = []
        for key, value in options.items():
            if value is True:
                made.append(f"--{key}")
            elif value is not None:
                made += [f"--{key}", str(value)]
        return made

    return make
