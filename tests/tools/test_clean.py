"""The command that cleans datasets."""

import csv
import json

import numpy as np
import pytest
from planted_faults import judge, plant_faults

from dsoftmax.recognition.common.vectors import normalized
from dsoftmax.recognition.data.records import Records
from dsoftmax.tools import clean


@pytest.fixture
def faulty(dataset, tmp_path, rng):
    """Write a dataset of which image 2, of identity 0, is a stranger, and labels 4 and 9 are one.

    The last identity has one image.
    """
    counts = (4,) * 10 + (1,)
    folder, _ = dataset(counts=counts)
    labels = np.repeat(np.arange(11), counts)
    person = np.where(labels == 9, 4, labels)
    person[2] = 20
    people = normalized(rng.normal(size=(21, 256)))
    rows = people[person] + 0.3 * normalized(rng.normal(size=(len(labels), 256)))
    np.save(tmp_path / "faces.npy", rows.astype(np.float32))
    return str(folder)


@pytest.fixture
def run(faulty, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*flags, embeddings="faces.npy"):
        given = ["--embeddings", embeddings] if embeddings else []
        return clean.main(["--input", faulty, *given, *flags])

    return run


def listed(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_without_an_output_it_only_looks(run, tmp_path, capsys):
    before = {path.name for path in tmp_path.iterdir()}
    assert run() == 0
    assert {path.name for path in tmp_path.iterdir()} - before == {"cleaning"}
    rows = listed("cleaning/suggestions.csv")
    assert [(row["reason"], row["label"], row["image"]) for row in rows] == [
        ("outlier", "0", "2"),
        ("same person", "9", ""),
        ("few images", "10", ""),
    ]
    near = listed("cleaning/cosines.csv")
    assert [int(row["image"]) for row in near] == list(range(len(near)))
    assert [row["label"] for row in near[:5]] == ["0", "0", "0", "0", "1"]
    assert near[2]["cosine"] == rows[0]["cosine"]
    assert all(float(row["cosine"]) > 0.7 for row in near if row is not near[2])
    assert (tmp_path / "cleaning" / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert "outlier      1\n" in capsys.readouterr().out


def test_what_is_chosen_is_carried_out(run, faulty):
    assert run("--output", "cleaned", "--drop-outliers", "--merge-identities") == 0
    records, before = Records("cleaned"), Records(faulty)
    assert len(records) == 40
    assert records.num_classes == 10
    assert np.bincount(records.labels).tolist() == [3, 4, 4, 4, 8, 4, 4, 4, 4, 1]
    kept = [records.read(image)[1].tobytes() for image in range(40)]
    assert before.read(2)[1].tobytes() not in kept
    assert len(listed("cleaned/identities.csv")) == 11


def test_small_identities_are_dropped(run):
    assert run("--output", "cleaned", "--drop-small", "--min-images", "4") == 0
    assert Records("cleaned").num_classes == 10  # all but the last


def test_an_edited_list_is_carried_out(run, tmp_path):
    assert run() == 0
    lines = (tmp_path / "cleaning" / "suggestions.csv").read_text().splitlines()
    (tmp_path / "edited.csv").write_text("\n".join([lines[0], lines[2]]) + "\n")  # only the merge
    assert run("--output", "cleaned", "--apply", "edited.csv", embeddings=None) == 0
    assert len(Records("cleaned")) == 41
    assert Records("cleaned").num_classes == 10


def test_results_for_machines(run, capsys):
    assert run("--json", "--output", "cleaned", "--drop-outliers") == 0
    results = json.loads(capsys.readouterr().out)
    assert results["suggestions"]["outlier"] == 1
    assert results["suggestions"]["same person"] == 1
    assert results["output"]["images"] == 40
    assert 0 < results["thresholds"]["outlier"] < results["thresholds"]["same_person"] < 1


def test_a_network_embeds_the_images(faulty, tmp_path, symbol_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--input", faulty, "--model", f"{symbol_model()},0", "--report", "report"]
    assert clean.main(flags) == 0
    assert (tmp_path / "report" / "report.html").exists()
    assert list((tmp_path / "report" / "embeddings").glob("faces-*/embeddings.npy"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--output", "cleaned"), "say what to carry out"),
        (("--drop-outliers",), "give --output"),
        (("--apply", "list.csv"), "--apply needs --output"),
        (("--apply", "list.csv", "--output", "x"), "--apply carries out a list as it is"),
        (("--batch-size", "0"), "--batch-size must be"),
        (("--model", "x,0"), "either --model or --embeddings"),
        (("--output", "faces", "--drop-outliers"), "is the folder of --input"),
    ],
)
def test_flags_that_do_not_fit(run, tmp_path, capsys, flags, message):
    assert run(*flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cleaning").exists()


@pytest.mark.slow
@pytest.mark.realdata
def test_planted_faults_among_real_faces(real_data, tmp_path):
    """2 % wrong labels, 2 % copies, a tenth of the larger identities split in two."""
    rng = np.random.default_rng(1)
    planted = plant_faults(Records(real_data / "lfw"), tmp_path / "faulty", rng)
    model = f"{real_data / 'y1' / 'model'},0"
    flags = ["--input", str(tmp_path / "faulty"), "--report", str(tmp_path), "--model", model]
    assert clean.main(flags) == 0
    found = judge(tmp_path / "suggestions.csv", planted)
    print(found)
    for reason, least in (("outlier", 0.95), ("duplicate", 0.9), ("same person", 0.9)):
        assert min(found[reason]) > least, found
