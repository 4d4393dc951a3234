"""A list of images is embedded as verification embeds a pack."""

import cv2
import numpy as np
import pytest
from conftest import make_image

from dsoftmax.eval.embed import embed_images
from dsoftmax.eval.models import load_model
from dsoftmax.eval.pairs import verify
from dsoftmax.recognition.data.images import ImageError
from dsoftmax.recognition.data.packs import Pack


@pytest.fixture
def images(rng):
    return [make_image(rng) for _ in range(6)]


def test_as_in_verification(images, symbol_model, tmp_path):
    embed = load_model(f"{symbol_model()},0")
    encoded = [cv2.imencode(".png", image[:, :, ::-1])[1].ravel() for image in images]
    expected = verify(embed, Pack("own", encoded, np.array([True, False, True])), folds=2)
    paths = []
    for number, content in enumerate(encoded):
        paths.append(tmp_path / f"{number}.png")
        paths[-1].write_bytes(content.tobytes())
    for given in (images, paths, [str(path) for path in paths], [images[0], *paths[1:]]):
        found = embed_images(embed, given, batch_size=4)
        np.testing.assert_allclose(found, expected.embeddings, atol=1e-5)
    cosines = (found[0::2] * found[1::2]).sum(axis=1)
    np.testing.assert_allclose(cosines, expected.cosines, atol=1e-5)


def test_without_mirror_images(images, symbol_model):
    embed = load_model(f"{symbol_model()},0")
    plain = embed(np.stack(images).transpose(0, 3, 1, 2))
    expected = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(embed_images(embed, images, flip=False), expected, atol=1e-5)


def test_sizes(images, symbol_model, tmp_path, rng):
    seen = []

    def embed(batch):
        seen.append(batch.shape)
        return batch.mean(axis=(2, 3))

    mixed = [*images, make_image(rng, 50, 40)]
    embed_images(embed, mixed, flip=False)
    embed_images(embed, mixed, flip=False, size=(20, 24))
    embed.image_size = (16, 16)  # as of a model that says what it was trained on
    embed_images(embed, mixed, flip=False)
    assert seen == [(7, 3, 32, 32), (7, 3, 20, 24), (7, 3, 16, 16)]


def test_mistakes_of_users(images, tmp_path):
    def embed(batch):
        return batch.mean(axis=(2, 3))

    with pytest.raises(ValueError, match="no image to embed"):
        embed_images(embed, [])
    with pytest.raises(ValueError, match=r"\(height, width, 3\) uint8 in RGB, not \(3, 32, 32\)"):
        embed_images(embed, [images[0].transpose(2, 0, 1)])
    (tmp_path / "bad.jpg").write_bytes(b"nothing")
    with pytest.raises(ImageError, match=r"bad.jpg: 7 bytes are no image"):
        embed_images(embed, [tmp_path / "bad.jpg"])
    with pytest.raises(FileNotFoundError, match=r"none.jpg"):
        embed_images(embed, [tmp_path / "none.jpg"])
