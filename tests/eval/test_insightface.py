"""insightface's functions, against what its documentation says they return."""

import pickle

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.eval import insightface
from dsoftmax.eval.models import load_model, parse_models
from dsoftmax.eval.pairs import verify
from dsoftmax.recognition.data.packs import read_pack, write_pack


@pytest.fixture
def pack(tmp_path, jpeg):
    path = str(tmp_path / "few.bin")
    write_pack(path, [jpeg() for _ in range(46)], [n % 3 == 0 for n in range(23)])
    return path


@pytest.fixture
def module(symbol_model):
    """Bind a network for batches of 8 as insightface's scripts do."""
    symbol, args, auxs = mx.model.load_checkpoint(symbol_model(), 0)
    module = mx.mod.Module(symbol.get_internals()["fc1_output"], label_names=None)
    module.bind([("data", (8, 3, 32, 32))], for_training=False)
    module.set_params(args, auxs, allow_extra=True)
    return module


def test_load_bin(pack):
    (images, mirrored), issame = insightface.load_bin(pack, (32, 32))
    assert images.shape == mirrored.shape == (46, 3, 32, 32)
    assert images.dtype == np.float32
    assert issame == [n % 3 == 0 for n in range(23)]
    reference = mx.image.imdecode(read_pack(pack).images[5].tobytes()).asnumpy()
    np.testing.assert_allclose(images[5].asnumpy().transpose(1, 2, 0), reference, atol=2)
    np.testing.assert_array_equal(mirrored.asnumpy(), images.asnumpy()[..., ::-1])


def test_load_bin_in_another_size(pack):
    (images, _), _ = insightface.load_bin(pack, (24, 20))
    assert images.shape == (46, 3, 24, 20)


def naive_rates(distances, is_same, folds):
    """Count the rates of each fold, threshold by threshold."""
    rates = []
    for fold in np.array_split(np.arange(len(distances)), folds):
        of_fold = []
        for threshold in np.arange(0, 4, 0.01):
            accepted = [place for place in fold if distances[place] < threshold]
            same = sum(is_same[place] for place in fold)
            right = sum(is_same[place] for place in accepted)
            wrong = len(accepted) - right
            others = len(fold) - same
            of_fold.append((right / same if same else 0, wrong / others if others else 0))
        rates.append(of_fold)
    return np.mean(rates, axis=0).T


@pytest.mark.parametrize("folds", [10, 3])
def test_evaluate_returns_insightfaces_six(rng, folds):
    is_same = rng.uniform(size=60) < 0.5
    first = rng.normal(size=(60, 5))
    second = np.where(is_same[:, None], first + 0.5 * rng.normal(size=(60, 5)), -first)
    embeddings = np.stack([first, second], axis=1).reshape(-1, 5)
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    tpr, fpr, accuracy, val, val_std, far = insightface.evaluate(embeddings, is_same, folds)
    distances = np.square(embeddings[::2] - embeddings[1::2]).sum(axis=1)
    expected = naive_rates(distances, is_same, folds)
    np.testing.assert_allclose([tpr, fpr], expected, atol=1e-12)
    assert accuracy.shape == (folds,)
    assert 0 <= far <= 1
    assert 0 <= val <= 1
    assert val_std >= 0


def test_a_module_gives_the_figures_of_verify(pack, module, capsys):
    """46 images are no multiple of 8: the last batch is filled up."""
    loaded = insightface.load_bin(pack, (32, 32))
    plain, plain_std, accuracy, std, xnorm, views = insightface.test(loaded, module, 8, nfolds=5)
    assert (plain, plain_std) == (0.0, 0.0)
    assert "testing verification.." in capsys.readouterr().out

    def embed(images):
        module.forward(mx.io.DataBatch([mx.nd.array(images)]), is_train=False)
        return module.get_outputs()[0].asnumpy()

    result = verify(embed, read_pack(pack), batch_size=1, folds=5, size=(32, 32))
    assert (accuracy, std) == (result.accuracy.mean, result.accuracy.deviation)
    assert xnorm == pytest.approx(result.xnorm, rel=1e-6)
    summed = views[0] + views[1]
    summed /= np.linalg.norm(summed, axis=1, keepdims=True)
    np.testing.assert_allclose(summed, result.embeddings, atol=1e-5)


def test_a_model_of_ours_instead_of_a_module(pack, symbol_model):
    (name,) = parse_models(f"{symbol_model()},0")
    model = load_model(name, [mx.cpu()])
    accuracy = insightface.test(insightface.load_bin(pack, (32, 32)), model, 10)[2]
    assert accuracy == verify(model, read_pack(pack), size=(32, 32)).accuracy.mean


def test_a_module_with_more_inputs_and_other_labels(pack, rng):
    """`data_extra` and `label_shape` reach the module."""
    seen = []

    class Module:
        def forward(self, batch, is_train):
            seen.append((batch, is_train))
            self._images = batch.data[0]

        def get_outputs(self):
            return [self._images.mean(axis=(2, 3))]

    extra = rng.normal(size=(10, 2))
    loaded = insightface.load_bin(pack, (32, 32))
    insightface.test(loaded, Module(), 10, data_extra=extra, label_shape=(10, 3))
    assert len(seen) == 2 * 5
    for batch, is_train in seen:
        assert not is_train
        assert len(batch.data[0]) == 10
        np.testing.assert_allclose(batch.data[1].asnumpy(), extra, rtol=1e-6)
        assert batch.label[0].shape == (10, 3)


def test_dump(pack, module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = insightface.load_bin(pack, (32, 32))
    insightface.dumpR(loaded, module, 8)
    with open("temp.bin", "rb") as file:
        embeddings, issame = pickle.load(file)  # of our own making
    assert issame == loaded[1]
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-5)


@pytest.mark.realdata
@pytest.mark.slow  # 1200 images; the test of eval/verification.py embeds the same ones
def test_the_published_y1(real_data, monkeypatch):
    """The digits that insightface's own code prints, on a part of them."""
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")  # or MXNet 1.9.1 fails on this network
    symbol, args, auxs = mx.model.load_checkpoint(str(real_data / "y1" / "model"), 0)
    module = mx.mod.Module(symbol.get_internals()["fc1_output"], label_names=None)
    module.bind([("data", (40, 3, 112, 112))], for_training=False)
    module.set_params(args, auxs)
    loaded = insightface.load_bin(str(real_data / "lfw" / "lfw_600.bin"), (112, 112))
    few = [data[:400] for data in loaded[0]], loaded[1][:200]
    _, _, accuracy, _, xnorm, _ = insightface.test(few, module, 40)
    assert accuracy == pytest.approx(0.99, abs=0.01)
    assert xnorm == pytest.approx(11.15, abs=0.1)
