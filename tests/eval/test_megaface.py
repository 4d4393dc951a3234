"""MegaFace end to end: its folders, of synthetic faces, through the real command."""

import json
import struct

import numpy as np
import pytest

from dsoftmax.eval import megaface, megaface_features
from dsoftmax.eval.megaface_features import ImageSet
from dsoftmax.recognition.data.synthetic import draw_person
from tests.pages import texts_of

PEOPLE, PHOTOS, STRANGERS = 4, 3, 25


@pytest.fixture(scope="module")
def pictures():
    probes = {
        f"person_{person}/photo_{number}.png": image
        for person in range(PEOPLE)
        for number, image in enumerate(draw_person(2, person, range(PHOTOS)))
    }
    distractors = {
        f"{number % 3}/{number}@N/{number}.jpg": draw_person(2, 100 + number, [0])[0]
        for number in range(STRANGERS)
    }
    return {"facescrub": probes, "megaface": distractors}


@pytest.fixture
def run(tmp_path, pictures, capsys, monkeypatch):
    """Write images and lists where insightface's flags look for them by default."""
    monkeypatch.chdir(tmp_path)
    for name, images in pictures.items():
        for path, encoded in images.items():
            file = tmp_path / "data" / f"{name}_images" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded)
        (tmp_path / "data" / f"{name}_lst").write_text("\n".join(images) + "\n")

    def run(*flags):
        code = megaface.main([str(flag) for flag in flags])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def read(folder, name, images, algo="insightface"):
    paths = ImageSet(name, list(images)).feature_paths(str(folder), algo)
    return np.stack([megaface_features.read_feature(path) for path in paths])


def naive(probes, people, distractors):
    """Count, for each probe and mate, the distractors as near as the mate or nearer."""
    ranks = []
    for i, j in np.ndindex(len(probes), len(probes)):
        if i != j and people[i] == people[j]:
            mate = probes[i] @ probes[j]
            ranks.append(1 + sum(probes[i] @ other >= mate for other in distractors))
    return np.array(ranks)


def test_the_whole_way(run, face_model, pictures, tmp_path):
    page = tmp_path / "megaface.html"
    code, out, _ = run("--model", face_model, "--json", "found.json", "--report", page)
    assert code == 0
    assert f"the page is {page}" in out
    (result,) = json.loads((tmp_path / "found.json").read_text())["results"]
    probes, distractors = (read("feature_out", name, images) for name, images in pictures.items())
    np.testing.assert_allclose(np.linalg.norm(probes, axis=1), 1, rtol=1e-5)
    people = np.repeat(np.arange(PEOPLE), PHOTOS)
    ranks = naive(probes, people, distractors)
    assert result["pairs"] == PEOPLE * PHOTOS * (PHOTOS - 1) == len(ranks)
    for rank, rate in enumerate(result["cmc"], 1):
        assert rate == pytest.approx(np.mean(ranks <= rank))
    assert list(result["distractors"]) == ["10", "25"]
    assert result["distractors"]["25"] == pytest.approx(np.mean(ranks == 1))
    assert f"Rank1@25: {100 * np.mean(ranks == 1):.2f}" in out
    genuine = [
        probes[i] @ probes[j] for i, j in np.ndindex(12, 12) if i != j and people[i] == people[j]
    ]
    highest = (probes @ distractors.T).max()
    assert result["tar_at_far"]["1e-06"] == pytest.approx(np.mean(np.array(genuine) > highest))
    names = {path.name for path in (tmp_path / "megaface_result").iterdir()}
    kinds = {"roc", "cmc", "distractors"}
    shown = texts_of(page)
    assert "How often the right person comes first among more and more strangers." in shown
    assert f"{100 * result['tar_at_far']['1e-06']:.2f}%" in shown
    assert names == {f"insightface-{kind}.{end}" for kind in kinds for end in ("png", "pdf")}


@pytest.mark.usefixtures("no_figures")
def test_what_is_there_is_not_made_again(run, symbol_model, pictures, tmp_path):
    model = ["--model", f"{symbol_model()},0"]
    assert run(*model)[0] == 0
    paths = ImageSet("megaface", list(pictures["megaface"])).feature_paths(
        "feature_out", "insightface"
    )
    kept = (tmp_path / paths[0]).stat().st_mtime_ns
    lost = tmp_path / paths[7]
    content = lost.read_bytes()
    lost.unlink()
    code, _, err = run(*model)
    assert code == 0
    assert "megaface: 1/1 images" in err
    again = np.frombuffer(lost.read_bytes(), "<f4", offset=16)
    np.testing.assert_allclose(again, np.frombuffer(content, "<f4", offset=16), atol=1e-5)
    assert (tmp_path / paths[0]).stat().st_mtime_ns == kept
    assert not list((tmp_path / "feature_out").rglob("*.part"))


@pytest.mark.usefixtures("no_figures")
def test_another_model_is_refused_the_folder(run, symbol_model):
    assert run("--model", f"{symbol_model('one')},0")[0] == 0
    code, _, err = run("--model", f"{symbol_model('two')},0")
    assert code == 2
    assert "feature_out holds features named insightface of another model" in err
    assert run("--model", f"{symbol_model('two')},0", "--algo", "two")[0] == 0


def test_a_damaged_description_of_a_folder(tmp_path):
    (tmp_path / "x.json").write_text('{"models": [')
    with pytest.raises(ValueError, match=r"x\.json: it does not say whose features these are"):
        megaface.claim_folder(str(tmp_path), "x", [], [])


def test_features_of_nobody_knows_whom(run, symbol_model, tmp_path, pictures):
    path = tmp_path / "feature_out" / "megaface" / f"{next(iter(pictures['megaface']))}_x.bin"
    path.parent.mkdir(parents=True)
    megaface_features.write_feature(str(path), np.ones(16))
    code, _, err = run("--model", f"{symbol_model()},0", "--algo", "x")
    assert code == 2
    assert "nothing says which model made it" in err


@pytest.mark.usefixtures("no_figures")
def test_two_networks_side_by_side(run, symbol_model, pictures):
    one, two = symbol_model("one", width=4), symbol_model("two", width=3)
    assert run("--model", f"{one},0|{two},0", "--algo", "both")[0] == 0
    for prefix, name in ((one, "one"), (two, "two")):
        assert run("--model", f"{prefix},0", "--algo", name)[0] == 0
    both, first, second = (
        read("feature_out", "facescrub", pictures["facescrub"], name)
        for name in ("both", "one", "two")
    )
    assert both.shape[1] == 7
    np.testing.assert_allclose(np.linalg.norm(both, axis=1), 1, rtol=1e-5)
    # Each network's features of length 1, side by side, brought to length 1 together.
    np.testing.assert_allclose(both, np.hstack([first, second]) / np.sqrt(2), atol=1e-4)


@pytest.mark.usefixtures("no_figures")
class TestNoise:
    def flags(self, tmp_path, pictures):
        (tmp_path / "fn.txt").write_text("# please cite\nphoto_9.png\nperson_1/photo_0.png\n")
        noisy = list(pictures["megaface"])[3:6]
        (tmp_path / "mn.txt").write_text("# please cite\n" + "\n".join(noisy) + "\n")
        return noisy, ["--facescrub-noises", "fn.txt", "--megaface-noises", "mn.txt"]

    def test_refined(self, run, symbol_model, pictures, tmp_path):
        noisy, flags = self.flags(tmp_path, pictures)
        model = ["--model", f"{symbol_model(width=11)},0"]
        code, out, err = run(*model, *flags, "--feature-dir-out", "clean", "--json", "a.json")
        assert code == 0
        assert "noisy: 1 probes, 3 distractors" in out
        assert "fn.txt: 1 images bear one of its 2 names" in err
        raw, marked = (
            read(folder, "megaface", pictures["megaface"]) for folder in ("feature_out", "clean")
        )
        assert marked.shape[1] == 12  # any width, not 512 alone
        expected = [100.0 if image in noisy else 0.0 for image in pictures["megaface"]]
        assert marked[:, 11].tolist() == expected
        np.testing.assert_allclose(marked[:, :11], raw, atol=1e-6)
        raw, cleaned = (
            read(folder, "facescrub", pictures["facescrub"]) for folder in ("feature_out", "clean")
        )
        changed = np.flatnonzero(np.abs(raw - cleaned[:, :11]).max(axis=1) > 1e-6)
        assert changed.tolist() == [PHOTOS]  # the first photo of person 1
        centre = raw[PHOTOS + 1 : 2 * PHOTOS].mean(axis=0)
        centre /= np.linalg.norm(centre)
        np.testing.assert_allclose(cleaned[PHOTOS, :11], centre, atol=0.0021)
        assert np.linalg.norm(cleaned[PHOTOS]) == pytest.approx(1, rel=1e-5)
        # The same ranks from the cleaned files as from the raw ones with the lists.
        code, out, _ = run("--output", "clean", "--json", "b.json")
        assert code == 0
        one, other = (json.loads((tmp_path / f"{n}.json").read_text())["results"][0] for n in "ab")
        assert one["distractors"] == other["distractors"]
        assert one["cmc"] == other["cmc"]
        assert max(map(int, one["distractors"])) == STRANGERS - 3

    def test_lists_where_run_sh_has_them(self, run, symbol_model, pictures, tmp_path):
        _, flags = self.flags(tmp_path, pictures)
        model = ["--model", f"{symbol_model()},0"]
        code, out, err = run(*model)
        assert code == 0
        assert "noisy" not in out
        for name in ("facescrub", "megaface"):
            assert f"{name}: no noise list, so nothing is cleaned" in err
        code, expected, _ = run(*model, *flags)
        for name, list_name in (("facescrub", "fn.txt"), ("megaface", "mn.txt")):
            (tmp_path / list_name).rename(tmp_path / "data" / f"{name}_noises.txt")
        code, cleaned, err = run(*model)
        assert code == 0
        assert cleaned == expected
        assert "nothing is cleaned" not in err
        code, not_cleaned, _ = run(*model, "--facescrub-noises", "", "--megaface-noises", "")
        assert not_cleaned == out

    @pytest.mark.parametrize(
        ("name", "image", "expected"),
        [
            ("1/22@N0/33_0.jpg", "1/22@N0/33_0.jpg", True),
            ("1/22@N0/33_0.jpg", "data/1/22@N0/33_0.jpg", True),
            ("data/1/22@N0/33_0.jpg", "1/22@N0/33_0.jpg", True),
            ("Ann_7.png", "Ann/Ann_7.png", True),
            ("1/22@N0/33_0.jpg", "1/23@N0/33_0.jpg", False),
            ("Ann_7.png", "Ann/Ann_77.png", False),
        ],
    )
    def test_forms_of_names(self, name, image, expected, tmp_path):
        (tmp_path / "noises").write_text(f"# cite\n\n3\t{name}\n")
        noises = megaface_features.read_noises(tmp_path / "noises")
        assert megaface_features.is_noisy([image], noises).tolist() == [expected]

    def test_a_person_without_a_sound_image(self, run, symbol_model, tmp_path):
        (tmp_path / "fn.txt").write_text("\n".join(f"person_1/photo_{n}.png" for n in range(3)))
        code, _, err = run("--model", f"{symbol_model()},0", "--facescrub-noises", "fn.txt")
        assert code == 2
        assert "all 3 images of a person are called noisy" in err


@pytest.mark.usefixtures("no_figures")
def test_unreadable_images_are_left_out(run, symbol_model, tmp_path, pictures):
    root = tmp_path / "data" / "megaface_images"
    (root / list(pictures["megaface"])[2]).write_bytes(b"no image")
    (root / list(pictures["megaface"])[4]).unlink()
    code, out, err = run("--model", f"{symbol_model()},0")
    assert code == 0
    assert "2 images of megaface can't be read" in err
    assert "8 bytes are no image" in err
    assert "missing: 0 probes, 2 distractors" in out
    assert "Rank1@23: " in out


@pytest.mark.usefixtures("no_figures")
class TestFiles:
    def test_layout(self, tmp_path):
        path = str(tmp_path / "x.bin")
        megaface_features.write_feature(path, np.array([1.5, -2.0, 3.25]))
        content = (tmp_path / "x.bin").read_bytes()
        assert content == struct.pack("<4i3f", 3, 1, 4, 5, 1.5, -2.0, 3.25)
        assert megaface_features.read_feature(path).tolist() == [1.5, -2.0, 3.25]

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            struct.pack("<4i", 0, 1, 4, 5),
            struct.pack("<4i2f", 3, 1, 4, 5, 0, 0),
            struct.pack("<4i3f", 2, 1, 4, 5, 0, 0, 0),
            struct.pack("<4i2f", 2, 1, 8, 6, 0, 0),
        ],
    )
    def test_broken(self, tmp_path, content):
        (tmp_path / "x.bin").write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.bin: "):
            megaface_features.read_feature(str(tmp_path / "x.bin"))

    def test_widths_that_differ(self, run, symbol_model, tmp_path, pictures):
        assert run("--model", f"{symbol_model()},0")[0] == 0
        name = next(iter(pictures["facescrub"]))
        path = tmp_path / "feature_out" / "facescrub" / f"{name}_insightface.bin"
        megaface_features.write_feature(str(path), np.ones(5))
        code, _, err = run()
        assert code == 2
        assert "numbers where other files have" in err

    @pytest.mark.parametrize("line", ["/etc/passwd", "../secret.jpg"])
    def test_lists_stay_inside(self, tmp_path, line):
        (tmp_path / "lst").write_text(f"a/b.jpg\n{line}\n")
        with pytest.raises(ValueError, match="is outside the images' folder"):
            megaface_features.read_list(str(tmp_path / "lst"))

    def test_bytes_that_no_path_has(self, tmp_path):
        (tmp_path / "lst").write_bytes(b"a/b.jpg\na/\0.jpg\n")
        with pytest.raises(ValueError, match=r"lst: it is not text, it has bytes that are 0"):
            megaface_features.read_list(str(tmp_path / "lst"))

    def test_numbers_that_are_not_finite(self, tmp_path):
        path = str(tmp_path / "x.bin")
        megaface_features.write_feature(path, np.array([1, np.nan]))
        with pytest.raises(ValueError, match=r"x\.bin: it holds NaN"):
            megaface_features.read_feature(path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--facescrub-lst", "nowhere"], "nowhere"),
        (["--facescrub-root", "nowhere"], "--facescrub-root nowhere: there is no such folder"),
        (["--sizes", "ten"], "--sizes is a list of numbers"),
        (["--image-size", "1,2,3,4"], "--image-size is 3,height,width or height,width"),
        (["--feature-dir-out", "clean"], "--feature-dir-out needs noise lists"),
        (["--max-rank", "0"], "--max-rank must be 1 or more"),
    ],
)
def test_mistakes_of_users(run, symbol_model, flags, message):
    code, _, err = run("--model", f"{symbol_model()},0", *flags)
    assert code == 2
    assert message in err


@pytest.mark.usefixtures("no_figures")
def test_size_of_training(run, symbol_model, pictures, tmp_path):
    (tmp_path / "small").mkdir()
    prefixes = [symbol_model(), symbol_model("small/model")]
    (tmp_path / "small" / "config.json").write_text('{"image_size": [48, 40]}')
    code, _, err = run("--model", "|".join(f"{prefix},0" for prefix in prefixes))
    assert code == 2
    assert "trained on images of 48x40 and 112x112" in err
    features = {}
    for algo, more, size in (
        ("trained", [], "48x40"),
        ("flag", ["--image-size", "48,40"], "48x40"),
        ("usual", ["--image-size", "112,112"], "112x112"),
    ):
        code, _, err = run("--model", f"{prefixes[1]},0", "--algo", algo, *more)
        assert code == 0
        assert f"images of {size}\n" in err
        features[algo] = read("feature_out", "facescrub", pictures["facescrub"], algo)
    np.testing.assert_array_equal(features["trained"], features["flag"])
    assert np.abs(features["trained"] - features["usual"]).max() > 1e-3


def test_no_features_at_all(run):
    code, _, err = run()
    assert code == 2
    assert "there is no such file, and none for any other image" in err
