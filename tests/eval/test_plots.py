"""Figures show the numbers they are given, in every format."""

import json

import numpy as np
import pytest

from dsoftmax.eval import metrics, plots


def lines_of(figure):
    (axes, *_) = figure.axes
    return {line.get_label(): line.get_xydata() for line in axes.get_lines()}


def test_roc_is_the_curve(rng):
    genuine, impostor = rng.normal(1, 1, 300), rng.normal(0, 1, 1000)
    curve = plots.sample_roc(genuine, impostor)
    assert curve.far[0] == pytest.approx(5e-3)  # fewer than five pairs are chance
    assert curve.far[-1] == pytest.approx(1)
    assert curve.tar[-1] == 1
    assert np.all(np.diff(curve.tar) >= 0)
    for far, tar in zip(curve.far[::20], curve.tar[::20]):
        assert tar == metrics.at_far(genuine, impostor, [far])[0].tar
    other = plots.sample_roc(genuine - 0.5, impostor)
    figure = plots.draw_roc({"one": curve, "other": other}, "lfw")
    found = lines_of(figure)
    np.testing.assert_allclose(found["one"][:, 1], curve.tar)
    np.testing.assert_allclose(found["other"][:, 1], other.tar)
    (axes,) = figure.axes
    assert axes.get_title() == "lfw"
    assert "where a curve begins: 5 pairs" in axes.get_xlabel()
    assert axes.get_xlim()[0] == pytest.approx(5e-3)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "other"]


def test_det_is_straight_for_normal_scores(rng):
    """Of N(2, 1) and N(0, 1), as deviates: false rejects = -2 - false accepts."""
    curve = plots.sample_roc(rng.normal(2, 1, 200_000), rng.normal(0, 1, 200_000))
    found = lines_of(plots.draw_det({"normal": curve}))["normal"]
    inside = found[np.abs(found).max(axis=1) < 2.5]
    assert len(inside) > 20
    np.testing.assert_allclose(inside[:, 1], -2 - inside[:, 0], atol=0.1)


def test_det_of_those_who_make_no_mistake():
    figure = plots.draw_det({"perfect": plots.Curve([0.1, 1.0], [1.0, 1.0])})
    assert lines_of(figure)["perfect"].size == 0


def test_roc_of_one_impostor():
    curve = plots.sample_roc(np.array([0.5, 0.1]), np.array([0.3]))
    assert curve == ([1.0], [1.0], [-np.inf])
    plots.draw_roc({"few": curve})


def test_histogram(rng):
    genuine, impostor = rng.normal(0.6, 0.1, 500), rng.normal(0, 0.1, 400)
    found = plots.bin_scores(genuine, impostor)
    assert sum(found.genuine) == pytest.approx(1)
    assert sum(found.impostor) == pytest.approx(1)
    middle = np.searchsorted(found.edges, 0.3)
    assert sum(found.genuine[:middle]) < 0.02 < 0.98 < sum(found.impostor[:middle])
    assert len(plots.draw_scores({"a": found, "b": found}).axes) == 2
    alike = plots.bin_scores(np.full(4, 0.5), np.full(0, 0.5))
    assert sum(alike.genuine) == pytest.approx(1)
    assert sum(alike.impostor) == 0


def test_histogram_with_a_threshold(rng):
    genuine, impostor = rng.normal(0.6, 0.2, 500), rng.normal(0, 0.2, 400)
    found = plots.bin_scores(genuine, impostor, 0.31)
    assert sum(found.genuine) == pytest.approx(1)
    assert sum(found.impostor) == pytest.approx(1)
    assert np.ptp(np.diff(found.edges)) < 1e-9
    (axes,) = plots.draw_scores({"a": found}).axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert f"different people, accepted: {np.mean(impostor > 0.31):.2%}" in legend
    assert f"one person, refused: {np.mean(genuine <= 0.31):.2%}" in legend
    (line,) = axes.get_lines()
    assert line.get_xdata() == [0.31, 0.31]
    assert line.get_label() == "threshold 0.310, mean of the folds"


@pytest.mark.parametrize("threshold", [-0.9, 0.95])
def test_a_threshold_beyond_all_scores(rng, threshold):
    genuine, impostor = rng.uniform(0.1, 0.9, 50), rng.uniform(-0.5, 0.5, 40)
    found = plots.bin_scores(genuine, impostor, threshold)
    (axes,) = plots.draw_scores({"a": found}).axes
    legend = " ".join(text.get_text() for text in axes.get_legend().get_texts())
    accepted, refused = ("100.00%", "0.00%") if threshold < 0 else ("0.00%", "100.00%")
    assert f"accepted: {accepted}" in legend
    assert f"refused: {refused}" in legend


def test_cmc_and_distractors():
    found = lines_of(plots.draw_cmc({"one": [0.5, 0.7, 0.9]}))
    np.testing.assert_allclose(found["one"], [[1, 0.5], [2, 0.7], [3, 0.9]])
    found = lines_of(plots.draw_distractors({"one": {10: 0.99, 100: 0.9}}))
    np.testing.assert_allclose(found["one"], [[10, 0.99], [100, 0.9]])


class TestClasses:
    def test_all_pairs_are_counted_once(self, rng):
        weights = rng.normal(size=(700, 24))
        edges, counts = plots.class_cosines(weights)
        unit = weights / np.linalg.norm(weights, axis=1, keepdims=True)
        cosines = [unit[i] @ unit[j] for i in range(700) for j in range(i)]
        assert counts.sum() == 700 * 699 // 2
        # float32 may put a cosine on the other side of an edge
        expected = np.histogram(cosines, edges)[0]
        assert np.abs(np.cumsum(counts) - np.cumsum(expected)).max() <= 5

    def test_many_classes_are_sampled(self, rng, monkeypatch):
        monkeypatch.setattr(plots, "CLASS_PAIRS", 5000)
        _, counts = plots.class_cosines(rng.normal(size=(900, 8)))
        assert counts.sum() == 100 * 99 // 2

    def test_random_weights_are_nearly_orthogonal(self, rng):
        figure = plots.draw_classes({"initial": rng.normal(size=(500, 256))})
        (label, reference) = lines_of(figure)
        assert reference == "random directions, about N(0, 1/256)"
        (axes,) = figure.axes
        assert axes.get_title() == "How far apart are the classes?"
        assert axes.get_xlabel().startswith("cosine between the weights of two classes")
        mean, spread = (float(text.split()[-1]) for text in label.split(", "))
        assert abs(mean) < 0.01
        assert spread == pytest.approx(3 / 16, abs=0.01)  # the paper: "around 3 sigma = 0.2"


def test_scatter(rng):
    embeddings, labels = rng.normal(size=(50, 3)), np.repeat(np.arange(5), 10)
    figure = plots.draw_scatter(embeddings, labels)
    assert len(figure.axes[0].collections) == 6  # the sphere and five classes
    with pytest.raises(ValueError, match="not of width 3"):
        plots.draw_scatter(rng.normal(size=(50, 4)), labels)


class TestCommand:
    def result(self, rng, name):
        genuine, impostor = rng.normal(1, 1, 30), rng.normal(0, 1, 100)
        return {
            "name": name,
            "target": "lfw",
            "roc": plots.sample_roc(genuine, impostor)._asdict(),
            "scores": plots.bin_scores(genuine, impostor)._asdict(),
            "cmc": [0.5, 0.6],
            "distractors": {"10": 0.9, "100": 0.8},
        }

    @pytest.mark.parametrize("kind", ["roc", "scores", "cmc", "distractors"])
    def test_results(self, rng, tmp_path, kind, capsys):
        paths = []
        for name in ("a", "b"):
            path = tmp_path / f"{name}.json"
            path.write_text(json.dumps({"results": [self.result(rng, "r50")]}))
            paths.append(str(path))
        for extension, start in (("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")):
            output = tmp_path / f"figure.{extension}"
            assert plots.main([kind, *paths, "--output", str(output)]) == 0
            assert output.read_bytes().startswith(start)
        found, title = plots._read_results(paths, kind)
        assert list(found) == ["a: r50", "b: r50"]
        assert title == "lfw"

    def test_arrays(self, rng, tmp_path):
        np.save(tmp_path / "w.npy", rng.normal(size=(50, 8)))
        np.savez(tmp_path / "e.npz", embeddings=rng.normal(size=(9, 3)), labels=np.arange(9) % 3)
        for kind, name in (("classes", "w.npy"), ("scatter", "e.npz")):
            output = tmp_path / f"{kind}.png"
            assert plots.main([kind, str(tmp_path / name), "--output", str(output)]) == 0
            assert output.exists()

    @pytest.mark.parametrize(
        ("kind", "name", "content", "message"),
        [
            ("roc", "a.json", b"[]", "a.json: not a file that a command of eval wrote"),
            ("roc", "a.json", b'{"results": []}', "there is no roc in any result"),
            ("classes", "a.npy", b"", "a.npy: "),
            ("scatter", "a.npz", b"nothing", "a .npz of `embeddings` and `labels`"),
        ],
    )
    def test_mistakes_of_users(self, tmp_path, kind, name, content, message, capsys):
        (tmp_path / name).write_bytes(content)
        flags = [kind, str(tmp_path / name), "--output", str(tmp_path / "figure.png")]
        assert plots.main(flags) == 2
        assert message in capsys.readouterr().err

    def test_unknown_formats(self, rng, tmp_path, capsys):
        np.save(tmp_path / "w.npy", rng.normal(size=(5, 8)))
        assert plots.main(["classes", str(tmp_path / "w.npy"), "--output", "figure.doc"]) == 2
        assert "must end in .png, .pdf or .svg" in capsys.readouterr().err
