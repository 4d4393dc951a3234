"""Verification against the protocol spelled out, and the command as its users call it."""

import dataclasses
import json
import os

import cv2
import mxnet as mx
import numpy as np
import pytest
from naive_metrics import naive_fold_accuracy

from dsoftmax.eval import metrics, plots, verification
from dsoftmax.eval.mistakes import contact_sheet, worst_mistakes
from dsoftmax.eval.models import ModelName, load_model
from dsoftmax.recognition.data.packs import Pack, write_pack
from dsoftmax.recognition.data.pairs import Pair, make_pack


@pytest.fixture
def pack(rng):
    """Make pairs of pictures; those of one person are the same picture with some noise."""

    def make(pairs=30, name="own", size=(32, 32), noise=40):
        images, issame = [], []
        for pair in range(pairs):
            same = pair % 3 != 0
            one = cv2.resize(rng.integers(0, 256, (3, 3, 3), np.uint8), size[::-1])
            other = one if same else cv2.resize(rng.integers(0, 256, (3, 3, 3), np.uint8), size)
            other = np.clip(other + rng.normal(0, noise, other.shape), 0, 255).astype(np.uint8)
            images += [cv2.imencode(".png", image)[1].ravel() for image in (one, other)]
            issame.append(same)
        return Pack(name, images, np.array(issame))

    return make


@pytest.fixture
def folder(tmp_path, pack):
    """Write packs into a folder."""

    def write(**packs):
        for name, pairs in packs.items():
            made = pack(pairs, name)
            write_pack(tmp_path / f"{name}.bin", made.images, made.issame)
        return str(tmp_path)

    return write


def raw_pixels(images):
    small = images[:, :, ::4, ::4].reshape(len(images), -1)
    return small.astype(np.float32) / 100 - 1


class TestEvaluate:
    def test_against_the_protocol_spelled_out(self, pack):
        made = pack()
        result = verification.verify(raw_pixels, made, batch_size=7)
        embeddings, norms = [], []
        for image in range(60):
            pixels = cv2.imdecode(made.images[image], cv2.IMREAD_COLOR)[:, :, ::-1].transpose(
                2, 0, 1
            )
            one, two = (raw_pixels(view[None])[0] for view in (pixels, pixels[:, :, ::-1]))
            norms += [np.linalg.norm(one), np.linalg.norm(two)]
            embeddings.append((one + two) / np.linalg.norm(one + two))
        distances = [np.sum((embeddings[2 * p] - embeddings[2 * p + 1]) ** 2) for p in range(30)]
        expected = naive_fold_accuracy(distances, made.issame, 10)
        assert (result.accuracy.mean, result.accuracy.deviation) == pytest.approx(expected)
        assert result.xnorm == pytest.approx(np.mean(norms), rel=1e-5)
        cosines = [embeddings[2 * p] @ embeddings[2 * p + 1] for p in range(30)]
        np.testing.assert_allclose(result.cosines, cosines, atol=1e-5)
        np.testing.assert_allclose(result.embeddings, embeddings, atol=1e-5)
        wins = np.mean([g > i for g in result.genuine for i in result.impostor])
        assert result.auc == pytest.approx(wins)

    def test_batch_size_and_threads_do_not_matter(self, pack):
        made = pack(12)
        results = [
            verification.evaluate(raw_pixels, [made], batch_size=size, threads=threads)[0]
            for size, threads in ((1, 1), (5, 2), (24, 1), (1000, 3))
        ]
        for result in results[1:]:
            np.testing.assert_array_equal(result.embeddings, results[0].embeddings)

    def test_rotated_embeddings_are_as_good(self, pack, rng):
        made = pack()
        width = raw_pixels(np.zeros((1, 3, 32, 32))).shape[1]
        rotation = np.linalg.qr(rng.normal(size=(width, width)))[0].astype(np.float32)
        one, other = (
            verification.evaluate(embed, [made])[0]
            for embed in (raw_pixels, lambda images: raw_pixels(images) @ rotation)
        )
        assert one.accuracy.mean == other.accuracy.mean
        np.testing.assert_allclose(one.cosines, other.cosines, atol=1e-5)

    def test_images_of_other_sizes_are_fitted(self, pack):
        made = pack(6, size=(40, 40))
        seen = set()

        def embed(images):
            seen.add(images.shape[1:])
            return raw_pixels(images)

        verification.evaluate(embed, [made], size=(24, 24))
        assert seen == {(3, 24, 24)}

    def test_nan_is_refused_with_the_pack_s_name(self, pack):
        with pytest.raises(ValueError, match="own: 60 of 60 embeddings hold NaN"):
            verification.evaluate(lambda images: np.full((len(images), 4), np.nan), [pack()])

    def test_pairs_of_one_kind(self, pack):
        made = pack(9)
        made = Pack("same", made.images, np.ones(9, bool))
        (result,) = verification.evaluate(raw_pixels, [made])
        assert np.isnan(result.auc)
        assert "roc" not in result.as_json()
        json.dumps(result.as_json())

    def test_one_result_per_pack(self, pack):
        packs = [pack(4, "first"), pack(6, "second")]
        results = verification.evaluate(raw_pixels, packs, folds=2)
        assert [result.name for result in results] == ["first", "second"]
        for made, result in zip(packs, results):
            alone = verification.verify(raw_pixels, made, folds=2)
            np.testing.assert_array_equal(result.cosines, alone.cosines)

    def test_two_pairs_are_enough(self, pack):
        (result,) = verification.evaluate(raw_pixels, [pack(2)])
        assert len(result.accuracy.accuracies) == 2


class TestCommand:
    def run(self, capsys, *flags):
        code = verification.main([str(flag) for flag in flags])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    def test_insightface_s_lines(self, capsys, folder, symbol_model):
        data, prefix = folder(lfw=20, cfp_fp=10, other=5), symbol_model(epoch=5)
        code, out, _ = self.run(capsys, "--data-dir", data, "--model", f"{prefix},5")
        assert code == 0
        embed = load_model(ModelName(prefix, 5), [mx.cpu()])
        packs = verification.find_packs(data, None)
        assert [one.name for one in packs] == ["lfw", "cfp_fp"]  # not `other`: nobody asked for it
        lines = out.splitlines()
        for result in verification.evaluate(embed, packs):
            name, flip = result.name, result.accuracy
            assert f"[{name}]XNorm: {result.xnorm:f}" in lines
            assert f"[{name}]Accuracy-Flip: {flip.mean:1.5f}+-{flip.deviation:1.5f}" in lines
            assert f"Max of [{name}] is {flip.mean:1.5f}" in lines
            assert any(line.startswith(f"[{name}]Accuracy: ") for line in lines)

    def test_epochs(self, capsys, folder, symbol_model):
        data = folder(lfw=12)
        for epoch in (1, 2, 3):
            prefix = symbol_model(epoch=epoch)
        flags = ["--data-dir", data, "--json", "--model"]
        for model, more, epochs in (
            (f"{prefix},1|3", [], [1, 3]),
            (prefix, ["--max", "1,3"], [2, 1]),
            (prefix, [], [3, 2, 1]),
        ):
            code, out, _ = self.run(capsys, *flags, model, *more)
            assert code == 0
            results = json.loads(out)["results"]
            assert [result["model"] for result in results] == [f"{prefix},{e}" for e in epochs]
        code, out, _ = self.run(capsys, "--data-dir", data, "--model", prefix)
        best = max(result["accuracy_flip"] for result in results)
        assert f"Max of [lfw] is {best:1.5f}" in out.splitlines()
        heading, *table = out.splitlines()[-4:]
        assert heading.split() == ["lfw"]
        assert [line.split()[0] for line in table] == [f"{prefix},{epoch}" for epoch in (3, 2, 1)]
        found = [float(line.split()[1].split("+-")[0]) for line in table]
        assert found == pytest.approx([result["accuracy_flip"] for result in results], abs=1e-5)

    def test_own_pairs_and_people(self, capsys, tmp_path, jpeg, symbol_model):
        for person in ("ann", "bo", "cy"):
            (tmp_path / "people" / person).mkdir(parents=True)
            for number in range(3):
                (tmp_path / "people" / person / f"{number}.jpg").write_bytes(jpeg(48, 48))
        (tmp_path / "own.csv").write_text("ann/0.jpg,ann/1.jpg,1\nann/0.jpg,bo/1.jpg,0\n" * 2)
        model = ["--model", f"{symbol_model()},0", "--image-size", "48", "--json"]
        flags = ["--data-dir", tmp_path / "people", "--pairs", tmp_path / "own.csv"]
        code, out, _ = self.run(capsys, *flags, *model)
        (result,) = json.loads(out)["results"]
        assert (code, result["target"], result["pairs"], result["same"]) == (0, "own", 4, 2)
        code, out, _ = self.run(capsys, "--people", tmp_path / "people", *model)
        (result,) = json.loads(out)["results"]
        assert (code, result["target"], result["pairs"], result["same"]) == (0, "people", 18, 9)

    def test_size_of_training(self, capsys, folder, symbol_model, tmp_path):
        data, prefix = folder(lfw=12), symbol_model()
        flags = ["--data-dir", data, "--model", f"{prefix},0"]
        code, plain, err = self.run(capsys, *flags)
        assert (code, f"{prefix},0 runs on {mx.cpu()}" in err.splitlines()) == (0, True)
        code, small, _ = self.run(capsys, *flags, "--image-size", "20,24")
        assert (code, small == plain) == (0, False)
        (tmp_path / "config.json").write_text('{"image_size": [20, 24]}')
        code, configured, err = self.run(capsys, *flags)
        assert (code, configured) == (0, small)
        assert f"{prefix},0 runs on {mx.cpu()}, images of 20x24" in err.splitlines()
        assert self.run(capsys, *flags, "--image-size", "32")[1] == plain  # the flag wins

    def test_figures_name_models(self, capsys, folder, symbol_model, tmp_path, monkeypatch):
        drawn = {}
        monkeypatch.setattr(
            plots, "save_both", lambda figure, stem: drawn.update({os.path.basename(stem): figure})
        )
        data = folder(lfw=24, own=12)
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            symbol_model(f"{name}/model")
        flags = ["--data-dir", data, "--plots", tmp_path, "--model", f"{tmp_path}/a/model,0"]
        for more, title, labels in (
            ([f"{tmp_path}/b/model,0", "--target", "lfw"], "lfw", ["a", "b"]),
            (["--target", "lfw"], "lfw", ["a"]),
            (["--target", "lfw,own"], "", ["a on lfw", "a on own"]),
        ):
            assert self.run(capsys, *flags, *more)[0] == 0
            (axes,) = drawn["roc"].axes
            assert axes.get_title() == title
            assert [text.get_text() for text in axes.get_legend().get_texts()] == labels
            panels = drawn["scores"].axes
            assert [panel.get_title() for panel in panels] == labels
            for panel in panels:
                (line,) = panel.get_lines()
                assert line.get_label().startswith("threshold ")

    def test_without_a_model(self, capsys, folder, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        code, _, err = self.run(capsys, "--data-dir", folder(lfw=4))
        assert code == 2
        assert "--model is missing: give prefix,epoch or a file.onnx, as in --model models/" in err
        assert err.count("\n") == 1

    def test_mistakes_embeddings_figures_thresholds(self, capsys, folder, symbol_model, tmp_path):
        data, prefix = folder(lfw=24), symbol_model(width=5)
        flags = ["--data-dir", data, "--model", f"{prefix},0", "--output", tmp_path / "out"]
        code, out, _ = self.run(
            capsys, *flags, "--mode", 1, "--plots", tmp_path / "figures", "--calibrate", "0.5,1e-2"
        )
        assert code == 0
        assert "takes 100 such pairs at least" in out
        assert cv2.imread(str(tmp_path / "out" / "lfw.png")).shape[1] >= 3 * 224
        names = {path.name for path in (tmp_path / "figures").iterdir()}
        assert names == {"roc.png", "roc.pdf", "scores.png", "scores.pdf"}
        code, out, _ = self.run(capsys, *flags, "--mode", 2, "--json", tmp_path / "found.json")
        with np.load(tmp_path / "out" / "lfw.npz") as saved:
            assert saved["embeddings"].shape == (48, 5)
            np.testing.assert_allclose(np.linalg.norm(saved["embeddings"], axis=1), 1, rtol=1e-5)
            assert saved["issame"].sum() == 16
        report = json.loads((tmp_path / "found.json").read_text())["results"][0]
        assert report["width"] == 5
        assert len(report["roc"]["far"]) == len(report["roc"]["tar"])

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--data-dir", "nowhere"], "--data-dir 'nowhere': there is no such folder"),
            (["--target", "cfp_fp"], "cfp_fp.bin: there is no such file; there are lfw"),
            (["--model", "nothing,1"], "nothing-symbol.json: there is no such file"),
            (["--batch-size", "0"], "--batch-size must be 1 or more"),
            (["--nfolds", "1"], "--nfolds must be 2 or more"),
            (["--gpu", "99"], "--gpu 99: MXNet sees"),
            (["--pairs", "a", "--people", "b"], "--pairs and --people: one of them"),
        ],
    )
    def test_mistakes_of_users(self, capsys, folder, symbol_model, flags, message):
        defaults = ["--data-dir", folder(lfw=4), "--model", f"{symbol_model()},0"]
        code, _, err = self.run(capsys, *defaults, *flags)
        assert code == 2
        assert message in err
        assert err.count("\n") == 1


def test_worst_mistakes():
    result = verification.Verification(
        "x",
        np.array([True, True, True, False, False, False]),
        None,
        np.array([0.9, 0.1, -0.2, 0.8, 0.6, 0.0]),
        1.0,
        metrics.FoldAccuracy(0, 0, np.zeros(1), np.array([1.0])),
        None,
        None,
        0.0,
        0.0,
    )
    assert result.threshold == 0.5
    refused, accepted = worst_mistakes(result)
    assert refused.tolist() == [2, 1]
    assert accepted.tolist() == [3, 4]
    refused, accepted = worst_mistakes(result, most=1)
    assert (refused.tolist(), accepted.tolist()) == ([2], [3])


def test_mistakes_are_shown_with_the_names_of_files(tmp_path, jpeg, monkeypatch):
    people = ["ann", "a_name_longer_than_its_picture", "bö", "cy"]
    for person in people:
        (tmp_path / person).mkdir()
        (tmp_path / person / "0001.jpg").write_bytes(jpeg(48, 48))
    paths = [str(tmp_path / person / "0001.jpg") for person in people]
    nothing = str(tmp_path / "nothing.jpg")
    pairs = [Pair(nothing, nothing, True), Pair(*paths[:2], True), Pair(*paths[2:], False)]
    (tmp_path / "nothing.jpg").write_bytes(b"")
    made, _, left_out, _ = make_pack("own", pairs)
    assert (len(left_out), made.paths) == (1, paths)
    result = verification.verify(raw_pixels, made, folds=2)
    wrong = dataclasses.replace(
        result,
        cosines=np.array([-0.5, 0.5]),
        accuracy=result.accuracy._replace(thresholds=np.array([2.0])),
    )
    written = []
    put_text = cv2.putText
    monkeypatch.setattr(
        cv2,
        "putText",
        lambda image, text, *more: written.append(text) or put_text(image, text, *more),
    )
    contact_sheet(made, wrong)
    assert {"ann/0001.jpg", "b?/0001.jpg", "cy/0001.jpg", "pair 0: -0.500"} <= set(written)
    assert "..ts_picture/0001.jpg" in written
    del written[:]
    contact_sheet(dataclasses.replace(made, paths=()), wrong)  # as of a .bin
    assert not any("jpg" in text for text in written)
    assert "pair 0: -0.500" in written


@pytest.mark.realdata
def test_the_published_network_has_its_published_figures(real_data, capsys):
    flags = ["--data-dir", real_data / "lfw", "--model", f"{real_data / 'y1' / 'model'},0"]
    assert verification.main([str(flag) for flag in [*flags, "--target", "lfw_600"]]) == 0
    out = capsys.readouterr().out
    assert "[lfw_600]Accuracy-Flip: 0.99333+-0.01106" in out
    assert "[lfw_600]XNorm: 11.149" in out


@pytest.mark.realdata
@pytest.mark.slow  # 2400 images
def test_the_published_network_on_disjoint_people(real_data, capsys):
    flags = ["--data-dir", real_data / "lfw", "--model", f"{real_data / 'y1' / 'model'},0"]
    assert verification.main([str(flag) for flag in [*flags, "--target", "lfw_val"]]) == 0
    out = capsys.readouterr().out
    assert "[lfw_val]Accuracy-Flip: 0.99417+-0.00750" in out
    assert "[lfw_val]XNorm: 11.181" in out
