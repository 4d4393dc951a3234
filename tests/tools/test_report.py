"""The report of a run is written again from its folder, with what is still there."""

import json
import shutil

import pytest

from dsoftmax.recognition import train
from dsoftmax.tools import report
from tests.pages import pictures, section, texts_of
from tests.recognition.conftest import draws_curves, faces, flags, writes_report  # noqa: F401
from tests.recognition.runs import folder_of


@pytest.fixture
def run(flags):  # noqa: F811
    """Train without a report; return the run's folder."""
    made = flags(loss="dsoftmax_k", sample_rate=0.4, max_steps=6, verbose=3)
    assert train.main(made) == 0
    folder = folder_of(made)
    assert not (folder / "report.html").exists()
    return folder


def test_from_the_folder_alone(run, capsys, tmp_path):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    page = run / "report.html"
    assert report.main(["--run", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(page)
    assert "6 of 6" in texts_of(page)
    assert pictures(page, "images-and-their-classes")[0] == 2
    assert pictures(page, "age-of-class-rows") == (1, 0)
    assert pictures(page, "classes")[1] > 0
    assert pictures(page, "hardest-mistakes")[1] > 0
    found = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert set(found) - set(before) == {page}
    assert all(found[path] == content for path, content in before.items())
    other = tmp_path / "other.html"
    assert report.main(["--run", str(run), "--output", str(other), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["report"] == str(other)
    assert said["verdict"]["headline"] in texts_of(other)


def test_what_is_gone_is_left_out(run, faces, capsys):  # noqa: F811
    shutil.rmtree(faces)
    shutil.rmtree(run / "states")
    assert report.main(["--run", str(run)]) == 0
    assert "there is no such folder" in capsys.readouterr().err
    page = run / "report.html"
    assert "No state was saved yet" in section(page, "classes")
    assert "The pack is not at hand" in section(page, "hardest-mistakes")
    assert pictures(page, "curves") == (3, 0)


def test_a_network_that_can_t_be_made(run, capsys):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "architecture": "strange"}))
    assert report.main(["--run", str(run)]) == 0
    assert "strange" in capsys.readouterr().err
    assert "is not at hand here" in section(run / "report.html", "images-and-their-classes")


def test_no_run(tmp_path, capsys):
    assert report.main(["--run", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "there is no config.json in it" in err
    assert err.count("\n") == 1
    (tmp_path / "config.json").write_text("{")
    assert report.main(["--run", str(tmp_path)]) == 2
    assert "it is no JSON" in capsys.readouterr().err
