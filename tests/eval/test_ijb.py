"""IJB end to end: folders in its shape, of synthetic faces, through the real command."""

import json

import numpy as np
import pytest

from dsoftmax.eval import ijb, ijb_protocols, metrics, templates
from dsoftmax.recognition.data.images import ARCFACE_TEMPLATE
from dsoftmax.recognition.data.synthetic import draw_person
from tests.pages import texts_of

PEOPLE, PHOTOS = 8, 6


@pytest.fixture(scope="module")
def pictures():
    return [draw_person(1, person, range(PHOTOS)) for person in range(PEOPLE)]


@pytest.fixture
def folder(tmp_path, pictures):
    """Write faces, templates, pairs and galleries; people 0-3 are in the first, 4-7 in the second.

    Each person has two templates: 100 + person of photos 0 to 2, the first two from one medium,
    and 200 + person of photos 3 to 5. The first ones are the galleries, the second ones probes.
    """

    def write(target="IJBC", galleries=("G1", "G2")):
        root, meta, crops = (tmp_path / part for part in ("data", "data/meta", "data/loose_crop"))
        for path in (meta, crops):
            path.mkdir(parents=True)
        faces, members, pairs = [], [], []
        points = " ".join(f"{value:.3f}" for value in ARCFACE_TEMPLATE.ravel())
        for person, photos in enumerate(pictures):
            for photo, encoded in enumerate(photos):
                name = f"{person}_{photo}.jpg"
                (crops / name).write_bytes(encoded)
                faces.append(f"{name} {points} {0.9 + 0.01 * photo:.3f}")
                template = (100 if photo < 3 else 200) + person
                members.append(f"{name} {template} {photo // 2}")
            for other in range(PEOPLE):
                pairs.append(f"{100 + person} {200 + other} {int(person == other)}")
        stem = target.lower()
        for name, lines in (
            ("name_5pts_score.txt", faces),
            ("face_tid_mid.txt", members),
            ("template_pair_label.txt", pairs),
            ("1N_probe_mixed.csv", ["T,S"] + [f"{200 + p},{p}" for p in range(PEOPLE)]),
            (f"1N_gallery_{galleries[0]}.csv", ["T,S"] + [f"{100 + p},{p}" for p in range(4)]),
            (f"1N_gallery_{galleries[1]}.csv", ["T,S"] + [f"{100 + p},{p}" for p in range(4, 8)]),
        ):
            (meta / f"{stem}_{name}").write_text("\n".join(lines) + "\n")
        return root

    return write


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*flags):
        code = ijb.main([str(flag) for flag in flags])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_whole_way(folder, run, face_model, tmp_path):
    root = folder()
    flags = ["--data-dir", root, "--model", face_model, "--job", "mine"]
    page = tmp_path / "ijb.html"
    code, out, err = run(*flags, "--json", tmp_path / "found.json", "--report", page)
    assert code == 0
    assert "48 faces, 16 templates (0 without a readable face), N1D1F1" in out
    (result,) = json.loads((tmp_path / "found.json").read_text())["results"]
    row = [f"{100 * rate:.2f}" for rate in result["tar_at_far"].values()]
    cells = [line.split("|") for line in out.splitlines() if "mine-IJBC" in line]
    assert [cell.strip() for cell in cells[0][2:-1]] == row
    assert f"1e-4: {' & '.join(row[::-1][:4])}" in out
    scores = np.load(tmp_path / "IJBC_result" / "mine.npy")
    issame = np.eye(PEOPLE, dtype=bool).ravel()
    expected = metrics.at_far(scores[issame], scores[~issame], ijb_protocols.FARS)
    assert list(result["tar_at_far"].values()) == [point.tar for point in expected]
    for name in ("mine.pdf", "mine.png", "mine-cmc.pdf", "mine-cmc.png"):
        assert (tmp_path / "IJBC_result" / name).exists()
    # 1:N from the same scores: template 100 + p and 200 + q are row p * PEOPLE + q
    table = scores.reshape(PEOPLE, PEOPLE)
    top1 = []
    for held in (range(4), range(4, 8)):
        first = [max(held, key=lambda p: table[p, probe]) for probe in held]
        top1.append(np.mean(np.array(first) == list(held)))
    assert result["ranks"]["1"] == pytest.approx(np.mean(top1))
    assert result["ranks"]["5"] == 1
    shown = texts_of(page)
    assert "Identification" in shown
    assert f"{100 * result['tar_at_far']['0.01']:.2f}%" in shown
    assert f"{100 * result['ranks']['1']:.2f}%" in shown
    out = out.replace(f"the page is {page}\n", "")
    # A second run has all embeddings and says the same.
    code, again, err = run(*flags)
    assert code == 0
    assert "IJBC: " not in err  # no progress of embedding
    assert again == out


@pytest.mark.usefixtures("no_figures")
def test_other_switches_use_the_same_embeddings(folder, run, symbol_model, tmp_path):
    root, model = folder("IJBB", ("S1", "S2")), f"{symbol_model()},0"
    seen = set()
    for flags in ([], ["--flip", 0], ["--norm", 0], ["--detector", 0]):
        code, _, _ = run("--target", "IJBB", "--data-dir", root, "--model", model, *flags)
        assert code == 0
        seen.add((tmp_path / "IJBB_result" / "insightface.npy").read_bytes())
    assert len(seen) == 4
    assert len(list((tmp_path / "IJBB_result" / "features").iterdir())) == 1


@pytest.mark.usefixtures("no_figures")
def test_the_flags_of_ijb_evals(folder, run, symbol_model, tmp_path):
    root, model = folder().rename(tmp_path / "IJBC"), f"{symbol_model()},0"
    short = ["-m", model, "-d", root.parent, "-s", "IJBC", "-b", 7]
    code, out, _ = run("--data-dir", root, "--model", model, "--protocol", "1n")
    assert code == 0
    code, same, _ = run(*short, "-N")
    assert code == 0
    assert same == out
    code, out, _ = run(*short, "-B", "--json", "found.json")
    assert code == 0
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    names = [f"N{n}D{d}F{f}" for n in (0, 1) for d in (0, 1) for f in (0, 1)]
    assert [result["switches"] for result in results] == names
    rows = [line for line in out.splitlines() if line.startswith("|") and "IJBC-" in line]
    assert [row.split("|")[1].strip() for row in rows] == [f"insightface-IJBC-{n}" for n in names]
    for result in results:  # each is what its own flags give
        n, d, f = result["switches"][1::2]
        flags = ["--norm", n, "--detector", d, "--flip", f, "--protocol", "11"]
        assert run(*short, *flags, "--json", "one.json")[0] == 0
        (alone,) = json.loads((tmp_path / "one.json").read_text())["results"]
        assert alone["tar_at_far"] == result["tar_at_far"]


@pytest.mark.usefixtures("no_figures")
def test_size_of_training(folder, run, symbol_model, tmp_path):
    flags = ["--data-dir", folder(), "--model", f"{symbol_model()},0", "--result-dir"]
    scores = {}
    for case, size in (("usual", "112x112"), ("flag", "48x40"), ("trained", "48x40")):
        if case == "trained":
            (tmp_path / "config.json").write_text('{"image_size": [48, 40]}')
        more = ["--image-size", "48,40"] if case == "flag" else []
        code, _, err = run(*flags, case, *more)
        assert code == 0
        assert f"runs on cpu(0), images of {size}\n" in err
        scores[case] = np.load(tmp_path / case / "insightface.npy")
    np.testing.assert_array_equal(scores["trained"], scores["flag"])
    assert np.abs(scores["trained"] - scores["usual"]).max() > 1e-3


@pytest.mark.usefixtures("no_figures")
def test_precomputed_features(folder, run, symbol_model, tmp_path):
    root = folder()
    prefix = symbol_model()
    assert run("--data-dir", root, "--model-prefix", prefix, "--model-epoch", 0)[0] == 0
    expected = np.load(tmp_path / "IJBC_result" / "insightface.npy")
    (cache,) = (tmp_path / "IJBC_result" / "features").iterdir()
    flags = ["--data-dir", root, "--features", cache / "features.npy", "--job", "again"]
    code, out, _ = run(*flags, "--protocol", "11")
    assert code == 0
    assert "1:N" not in out
    np.testing.assert_array_equal(np.load(tmp_path / "IJBC_result" / "again.npy"), expected)
    np.save(tmp_path / "summed.npy", np.load(cache / "features.npy").sum(axis=1))
    code, out, _ = run("--data-dir", root, "--features", tmp_path / "summed.npy", "--job", "sum")
    assert code == 0
    assert "N1D1F0" in out
    np.testing.assert_allclose(np.load(tmp_path / "IJBC_result" / "sum.npy"), expected, atol=1e-5)


@pytest.mark.usefixtures("no_figures")
def test_missing_faces_are_listed_and_lowest(folder, run, symbol_model, tmp_path):
    root = folder()
    crops = root / "loose_crop"
    for photo in range(3):
        (crops / f"2_{photo}.jpg").unlink()  # all of template 102
    (crops / "5_4.jpg").write_bytes(b"\xff\xd8 cut off")
    code, out, err = run("--data-dir", root, "--model", f"{symbol_model()},0", "--json")
    assert code == 0
    (result,) = json.loads(out)["results"]
    assert (result["unreadable_faces"], result["empty_templates"]) == (4, 1)
    assert "4 of 48 faces can't be read" in err
    listed = (tmp_path / "IJBC_result" / "insightface-unreadable.txt").read_text()
    assert "5_4.jpg: the JPEG has no end marker" in listed
    assert listed.count("No such file") == 3
    scores = np.load(tmp_path / "IJBC_result" / "insightface.npy").reshape(PEOPLE, PEOPLE)
    assert (scores[2] == -1).all()
    assert (np.delete(scores, 2, axis=0) > -1).all()


class TestOpenSet:
    """Galleries apart, strangers from the other gallery, by hand."""

    @pytest.fixture
    def pooled(self):
        directions = {101: 0, 102: 90, 103: 180, 201: 10, 202: 80, 203: 140, 204: 45, 205: 170}
        angles = np.radians(list(directions.values()))
        features = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        return templates.Templates(np.array(list(directions)), features)

    def test_thresholds_are_made_on_strangers(self, pooled):
        gallery = np.array([101, 102]), np.array([1, 2])
        probes = np.array([201, 202, 203, 204]), np.array([1, 2, 3, 4])
        found = ijb_protocols.search(pooled, gallery, probes, "G1")
        assert found.identification.ranks.tolist() == [1, 1]
        strangers = np.cos(np.radians([50, 45]))  # 203 to 102, 204 to either
        np.testing.assert_allclose(np.sort(found.identification.other_scores), strangers, atol=1e-6)
        assert found.points[0].threshold == pytest.approx(strangers[1], abs=1e-6)
        assert found.points[0].tar == 1

    def test_galleries_are_averaged_not_joined(self, pooled):
        searches = [
            ijb_protocols.search(pooled, (np.array([template]), np.array([person])), probes, "")
            for template, person in ((101, 1), (103, 3))
            for probes in [(np.array([201, 202, 205]), np.array([1, 3, 1]))]
        ]
        means = ijb_protocols.mean_of_galleries(searches)
        assert means["ranks"]["1"] == 1  # each gallery has one person; joined, 205 would be wrong
        joined = ijb_protocols.search(
            pooled,
            (np.array([101, 103]), np.array([1, 3])),
            (np.array([201, 202, 205]), np.array([1, 3, 1])),
            "both",
        )
        assert joined.identification.rank_rate(1) < 1

    def test_a_gallery_of_strangers(self, pooled):
        gallery, probes = (np.array([101]), np.array([1])), (np.array([203]), np.array([3]))
        with pytest.raises(ValueError, match="gallery G9 holds nobody the probes show"):
            ijb_protocols.search(pooled, gallery, probes, "G9")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", ""], "either --model prefix,epoch or --features"),
        (["--features", "f.npy"], "either --model prefix,epoch or --features"),
        (["--data-dir", "nowhere"], "is --data-dir nowhere the folder of IJBC?"),
        (["--target", "IJBB"], "the folder of IJBB?"),
        (["--model", "nothing,1"], "nothing-symbol.json"),
        (["--model", "a,1|2"], "one network at a time"),
        (["--batch-size", "0"], "--batch-size must be 1 or more"),
        (["-d", "data"], "--data-dir and -d: one of them"),
        (["-B", "-N"], "-B compares settings of 1:1"),
    ],
)
def test_mistakes_of_users(folder, run, symbol_model, flags, message):
    code, _, err = run("--data-dir", folder(), "--model", f"{symbol_model()},0", *flags)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((47, 8), np.float32), "47 rows for 48 faces"),
        (np.zeros((48, 3, 8), np.float32), "features are floats"),
        (np.zeros((48, 8), int), "features are floats"),
        (np.full((48, 8), np.nan), "bad.npy: row 0 holds NaN, or numbers beyond 1e+15"),
        (np.eye(48, 8, k=-3) * 1e30, "bad.npy: row 3 holds NaN, or numbers beyond 1e+15"),
    ],
)
def test_bad_features(folder, run, tmp_path, array, message):
    np.save(tmp_path / "bad.npy", array)
    code, _, err = run("--data-dir", folder(), "--features", tmp_path / "bad.npy")
    assert code == 2
    assert message in err
