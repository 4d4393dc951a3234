"""Embeddings of a dataset, against those of a list of images."""

import numpy as np
import pytest

from dsoftmax.eval import dataset_embeddings
from dsoftmax.eval.dataset_embeddings import embed_dataset
from dsoftmax.eval.embed import embed_images
from dsoftmax.eval.models import load_model
from dsoftmax.recognition.data.images import load_rgb
from dsoftmax.recognition.data.records import Records, RecordWriter


def test_the_rows_are_those_of_the_images(dataset, symbol_model, tmp_path):
    folder, images = dataset(counts=(3, 4))
    records, model = Records(folder), f"{symbol_model()},0"
    found = embed_dataset(records, model, str(tmp_path / "cache"), batch_size=2)
    loaded = [load_rgb(np.frombuffer(image, np.uint8)) for _, image in images]
    np.testing.assert_allclose(found, embed_images(load_model(model), loaded), atol=1e-5)


def test_nothing_is_embedded_twice(dataset, symbol_model, tmp_path, monkeypatch, jpeg):
    folder, _ = dataset(counts=(3, 4))
    model, cache = f"{symbol_model()},0", str(tmp_path / "cache")
    first = np.array(embed_dataset(Records(folder), model, cache))

    def refuse(*_):
        raise AssertionError("the network was loaded again")

    with monkeypatch.context() as patch:
        patch.setattr(dataset_embeddings, "load_model", refuse)
        again = embed_dataset(Records(folder), model, cache)
        assert (again == first).all()
    with RecordWriter(folder, (32, 32), overwrite=True) as writer:
        for label in (0, 0, 0, 1, 1, 1, 1):
            writer.add(label, jpeg())
    other = embed_dataset(Records(folder), model, cache)
    assert not np.allclose(other, first)


def test_unreadable_images_are_named(tmp_path, jpeg, symbol_model, capsys):
    with RecordWriter(tmp_path / "faces", (32, 32)) as writer:
        writer.add(0, jpeg())
        writer.add(0, jpeg()[:-30])
    rows = embed_dataset(Records(tmp_path / "faces"), f"{symbol_model()},0", str(tmp_path))
    assert np.linalg.norm(rows, axis=1) == pytest.approx([1, 0], abs=1e-5)
    assert "image 1: the JPEG has no end marker" in capsys.readouterr().err


def test_one_network_at_a_time(dataset, tmp_path):
    with pytest.raises(ValueError, match="one network at a time"):
        embed_dataset(Records(dataset()[0]), "a,1|2", str(tmp_path))
