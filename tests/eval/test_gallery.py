"""Galleries: built, added to, searched, never with another model."""

import json
import os
import shutil

import cv2
import numpy as np
import pytest

from dsoftmax.eval import gallery as module
from dsoftmax.eval.embed import embed_images
from dsoftmax.eval.gallery import Gallery, add, build, draw_matches
from dsoftmax.eval.models import load_model, parse_models
from dsoftmax.recognition.data.inputs import open_images
from tests.conftest import make_image

SIZE = (32, 32)


@pytest.fixture
def save(tmp_path, rng):
    def write(*names):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(cv2.imencode(".png", make_image(rng))[1].tobytes())
        return str(tmp_path / names[0].split("/")[0])

    return write


@pytest.fixture
def people(save):
    return save("people/ann/1.png", "people/ann/2.png", "people/bo/1.png", "people/cy/1.png")


@pytest.fixture
def embed(symbol_model):
    return load_model(f"{symbol_model(scale=3.0)},0")


def naive(embed, folder, query, top):
    """Return (person, path, cosine) of the nearest people, from embeddings in float64."""
    images = open_images(folder)
    vectors = embed_images(embed, images, size=SIZE).astype(float)
    cosines = vectors @ query.astype(float)
    best = {}
    for number in np.argsort(-cosines, kind="stable"):
        path = os.path.abspath(images.name(number))
        best.setdefault(images.label(number), (images.label(number), path, cosines[number]))
    return list(best.values())[:top]


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("float16", 1e-3), ("int8", 0.02)])
def test_build_and_search(people, embed, tmp_path, dtype, error):
    done = build(str(tmp_path / "gallery"), people, embed, SIZE, dtype)
    assert (done.added, done.known) == (4, 0)
    gallery = Gallery(str(tmp_path / "gallery"))
    assert (len(gallery), gallery.num_people, gallery.dtype) == (4, 3, dtype)
    queries = embed_images(embed, open_images(people), size=SIZE)
    for query, found in zip(queries, gallery.search(queries, 2)):
        expected = naive(embed, people, query, 2)
        assert [match.cosine for match in found] == pytest.approx(
            [cosine for *_, cosine in expected], abs=error
        )
        assert found[0][:2] == expected[0][:2]
    (found,) = gallery.search(queries[:1], 5)
    assert [match.person for match in found].count("ann") == 1
    assert {match.person: match.images for match in found} == {"ann": 2, "bo": 1, "cy": 1}
    (above,) = gallery.search(queries[:1], 5, threshold=found[0].cosine - 1e-3)
    assert [match.person for match in above] == ["ann"]
    assert gallery.search(queries[:1], 5, threshold=1.5) == [[]]
    kinds = ["csv", "vectors.npy", *["scales.npy"] * (dtype == "int8")]
    expected = {"gallery.json", *(f"part-0.{kind}" for kind in kinds)}
    assert set(os.listdir(tmp_path / "gallery")) == expected


def test_adding_embeds_only_what_is_new(people, embed, tmp_path, save):
    folder = str(tmp_path / "gallery")
    build(folder, people, embed, SIZE, "float32")
    before = (tmp_path / "gallery/part-0.vectors.npy").read_bytes()
    save("people/bo/2.png", "people/dee/1.png")
    loaded = []

    class Counting:
        name = embed.name

        def __call__(self, batch):
            loaded.append(len(batch))
            return embed(batch)

    done = add(Gallery(folder), people, Counting(), batch_size=8)
    assert (done.added, done.known) == (2, 4)
    assert loaded == [1, 2, 2]  # to see the width; two images, and their mirror images
    assert add(Gallery(folder), people, Counting())[:2] == (0, 6)
    gallery = Gallery(folder)
    assert (len(gallery), gallery.num_people) == (6, 4)
    assert (tmp_path / "gallery/part-0.vectors.npy").read_bytes() == before
    queries = embed_images(embed, open_images(people), size=SIZE)
    for query, found in zip(queries, gallery.search(queries, 4)):
        expected = naive(embed, people, query, 4)
        assert [match[:2] for match in found] == [entry[:2] for entry in expected]


def test_an_interrupted_addition_changes_nothing(people, embed, tmp_path, save, monkeypatch):
    folder = str(tmp_path / "gallery")
    build(folder, people, embed, SIZE)
    save("people/dee/1.png")
    before = (tmp_path / "gallery/gallery.json").read_bytes()

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_table", fail)  # the last file before the part is listed
        with pytest.raises(KeyboardInterrupt):
            add(Gallery(folder), people, embed)
    assert (tmp_path / "gallery/gallery.json").read_bytes() == before
    assert len(Gallery(folder)) == 4
    assert add(Gallery(folder), people, embed).added == 1
    assert len(Gallery(folder)) == 5
    assert not [name for name in os.listdir(folder) if name.startswith("new")]


def test_broken_images_are_left_out(people, embed, tmp_path):
    (tmp_path / "people/bo/0.png").write_bytes(b"no image")
    done = build(str(tmp_path / "gallery"), people, embed, SIZE)
    assert done.added == 4
    assert [done.images.name(row) for row, _ in done.embedded.unreadable] == [f"{people}/bo/0.png"]
    faces = Gallery(str(tmp_path / "gallery")).faces
    assert [face.path for face in faces] == [
        f"{people}/{name}.png" for name in ("ann/1", "ann/2", "bo/1", "cy/1")
    ]
    shutil.rmtree(people)
    (tmp_path / "people/ann").mkdir(parents=True)
    (tmp_path / "people/ann/1.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="not one of its 1 images can be used"):
        build(str(tmp_path / "other"), people, embed, SIZE)


def test_another_model_is_refused(people, embed, tmp_path, symbol_model):
    folder = str(tmp_path / "gallery")
    build(folder, people, embed, SIZE)
    gallery = Gallery(folder)
    (own,) = parse_models(gallery.model)
    gallery.check(own)
    other = load_model(f"{symbol_model('other')},0")
    with pytest.raises(ValueError, match=r"was built with .*model,0, .*other,0 is another model"):
        gallery.check(other.name)
    with pytest.raises(ValueError, match="is another model"):
        add(gallery, people, other)
    with pytest.raises(FileExistsError, match="is a gallery already"):
        build(folder, people, other, SIZE)
    with pytest.raises(FileNotFoundError, match="build a gallery first"):
        Gallery(str(tmp_path))
    with pytest.raises(ValueError, match="kept as float32, float16, int8, not as 'int4'"):
        build(str(tmp_path / "more"), people, other, SIZE, "int4")
    assert json.loads((tmp_path / "gallery/gallery.json").read_text())["size"] == [32, 32]


def test_the_sheet(people, embed, tmp_path):
    folder = str(tmp_path / "gallery")
    build(folder, people, embed, SIZE)
    gallery, images = Gallery(folder), open_images(people)
    matches = gallery.search(embed_images(embed, images, size=SIZE), 2)
    whole = draw_matches(gallery, images, range(4), matches)
    os.unlink(matches[0][1].path)
    gone = draw_matches(gallery, images, [0], matches[:1])
    assert whole.shape[1] == gone.shape[1]
    nobody = draw_matches(gallery, images, [0], [[]], threshold=0.9)
    assert nobody.shape[0] == gone.shape[0]
    assert nobody.shape[1] < gone.shape[1]


def test_damaged_files_are_named(people, embed, tmp_path):
    folder = tmp_path / "gallery"
    build(str(folder), people, embed, SIZE)
    lines = (folder / "part-0.csv").read_text().splitlines()
    (folder / "part-0.csv").write_text("\n".join(lines[:-1]))
    with pytest.raises(ValueError, match=r"part-0.csv: 3 rows for 4 vectors"):
        Gallery(str(folder))
    (folder / "part-0.csv").write_text("\n".join(["x", *lines[1:]]))
    with pytest.raises(ValueError, match=r"part-0.csv: not the list of a gallery's images"):
        Gallery(str(folder))
    (folder / "part-0.csv").write_text("\n".join(lines))
    sound = np.load(folder / "part-0.scales.npy")
    for scales in (sound[:2], sound * np.nan, sound.astype(float)):
        np.save(folder / "part-0.scales.npy", scales)
        with pytest.raises(ValueError, match=r"part-0.scales.npy: it is not one finite float32"):
            Gallery(str(folder)).search(np.eye(1, 16), 1)
    np.save(folder / "part-0.scales.npy", sound)
    with pytest.raises(ValueError, match=r"vectors of 16 numbers, but .* embeddings have 8"):
        Gallery(str(folder)).search(np.eye(1, 8), 1)
    np.save(folder / "part-0.vectors.npy", np.zeros((3, 16), np.int8))
    with pytest.raises(ValueError, match=r"part-0.vectors.npy: int8 \(3, 16\) instead of int8"):
        Gallery(str(folder)).search(np.eye(1, 16), 1)
    state = json.loads((folder / "gallery.json").read_text())
    for name in state:
        part = {key: value for key, value in state.items() if key != name}
        (folder / "gallery.json").write_text(json.dumps(part))
        with pytest.raises(ValueError, match=r"gallery.json: not the description of a gallery"):
            Gallery(str(folder))
    (folder / "gallery.json").write_text(json.dumps({**state, "parts": [{"name": "part-0"}]}))
    with pytest.raises(ValueError, match=r"gallery.json: not the description of a gallery"):
        Gallery(str(folder))
    (folder / "gallery.json").write_text("{")
    with pytest.raises(ValueError, match=r"gallery.json: not the description of a gallery"):
        Gallery(str(folder))


def test_lists_with_landmarks(save, embed, tmp_path, rng):
    save("photos/a.png", "photos/b.png")
    points = rng.uniform(8, 24, (5, 2))
    row = ",".join(f"{value:.3f}" for value in points.ravel())
    heading = "path,label,x1,y1,x2,y2,x3,y3,x4,y4,x5,y5"
    (tmp_path / "photos/list.csv").write_text(f"{heading}\na.png,Ann,{row}\nb.png,Bo{',' * 10}\n")
    path = str(tmp_path / "photos/list.csv")
    build(str(tmp_path / "gallery"), path, embed, SIZE, "float32")
    gallery = Gallery(str(tmp_path / "gallery"))
    np.testing.assert_allclose(gallery.faces[0].landmarks, points, atol=1e-3)
    assert gallery.faces[1].landmarks is None
    queries = embed_images(embed, open_images(path), size=SIZE)
    (found, _) = gallery.search(queries, 1)
    assert found[0].person == "Ann"
    assert found[0].cosine == pytest.approx(1, abs=1e-5)
