"""Class weights in the files of insightface and Partial FC, made here as these write them."""

import json

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd

from dsoftmax import losses
from dsoftmax.recognition import states
from dsoftmax.recognition.class_files import open_class_weights, open_momenta

CLASSES, WIDTH = 7, 4


@pytest.fixture
def weights(rng):
    return rng.normal(size=(CLASSES, WIDTH)).astype(np.float32)


def shards_of(weights, count):
    """Split as insightface does: equal shards, the last one filled up with more rows."""
    size = -(-len(weights) // count)
    padding = np.full((size * count - len(weights), weights.shape[1]), 9, np.float32)
    return np.split(np.concatenate([weights, padding]), count)


def save_model(prefix, arrays):
    embedding = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=WIDTH, name="fc1")
    mx.model.save_checkpoint(
        str(prefix), 1, embedding, {name: nd.array(array) for name, array in arrays.items()}, {}
    )
    return f"{prefix}-0001.params"


def assert_read(path, weights, **options):
    np.testing.assert_array_equal(open_class_weights(str(path), **options).whole(), weights)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_npy(tmp_path, weights, dtype):
    np.save(tmp_path / "classes.npy", weights.astype(dtype))
    assert_read(tmp_path / "classes.npy", weights.astype(dtype).astype(np.float32))


def test_insightface_s_uncut_model(tmp_path, weights):
    path = save_model(tmp_path / "model", {"fc1_weight": np.ones((4, 3)), "fc7_weight": weights})
    assert_read(path, weights)
    assert_read(path, weights, num_classes=CLASSES)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_shards_of_the_parallel_module(tmp_path, weights, count):
    shards = shards_of(weights, count)
    arrays = {f"fc7_{number}_weight": shard for number, shard in enumerate(shards)}
    path = save_model(tmp_path / "model", dict(reversed(list(arrays.items()))))
    assert_read(path, np.concatenate(shards))
    assert_read(path, weights, num_classes=CLASSES)


def test_more_than_ten_shards(tmp_path, rng):
    weights = rng.normal(size=(23, WIDTH)).astype(np.float32)
    arrays = {f"fc7_{number}_weight": part for number, part in enumerate(shards_of(weights, 12))}
    assert_read(save_model(tmp_path / "model", arrays), weights, num_classes=23)


def save_centers(folder, weights, count, kind="centers"):
    for rank, shard in enumerate(shards_of(weights, count)):
        nd.save(str(folder / f"{rank}_{kind}.param"), nd.array(shard))


@pytest.mark.parametrize("count", [1, 3, 11])
def test_partial_fc(tmp_path, rng, count):
    weights = rng.normal(size=(31, WIDTH)).astype(np.float32)
    save_centers(tmp_path, weights, count)
    save_centers(tmp_path, 2 * weights, count, "centers_mom")
    assert_read(tmp_path, weights, num_classes=31)
    assert_read(tmp_path / "0_centers.param", weights, num_classes=31)
    (momenta,) = open_momenta(str(tmp_path), 31)
    np.testing.assert_array_equal(momenta.whole(), 2 * weights)
    with pytest.raises(ValueError, match="these are Partial FC's centers_mom, not its centers"):
        open_class_weights(str(tmp_path / "0_centers_mom.param"))


def test_a_file_of_a_head(tmp_path, weights):
    head = losses.create("dsoftmax", CLASSES, WIDTH, ctx=[mx.cpu(0), mx.cpu(1)])
    head.load_class_weights(weights)
    head.save_parameters(str(tmp_path / "head.params"))
    assert_read(tmp_path / "head.params", weights)


@pytest.mark.parametrize("given", [".", "states", "states/state-00000009"])
def test_a_state(tmp_path, weights, given):
    for step in (8, 9):
        path = tmp_path / "states" / f"state-{step:08d}"
        path.mkdir(parents=True)
        writer = states.StateWriter(str(path))
        for name in states.FILES:
            with writer.file(name) as file:
                if name == "classes.npy":
                    np.save(file, weights + (step == 8))
                else:
                    file.write(b"any")
        writer.describe({"step": step, "num_classes": CLASSES, "embedding_size": WIDTH})
    assert_read(tmp_path / given, weights)
    damaged = tmp_path / "states" / "state-00000009" / "classes.npy"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"9 is damaged \(classes.npy: block 1 of 1"):
        open_class_weights(str(tmp_path / given))
    assert_read(tmp_path / "states" / "state-00000008", weights + 1)


def test_stacked_momenta(tmp_path, rng):
    momenta = rng.normal(size=(2, CLASSES, WIDTH)).astype(np.float32)
    np.save(tmp_path / "momenta.npy", momenta)
    found = open_momenta(str(tmp_path / "momenta.npy"), CLASSES)
    np.testing.assert_array_equal([rows.whole() for rows in found], momenta)
    np.testing.assert_array_equal(found[1].take([3]), momenta[1, 3:4])
    np.save(tmp_path / "momenta.npy", momenta[0])
    (found,) = open_momenta(str(tmp_path / "momenta.npy"), CLASSES)
    np.testing.assert_array_equal(found.whole(), momenta[0])
    with pytest.raises(ValueError, match=r"momenta are a .npy file, as"):
        open_momenta(str(tmp_path), CLASSES)
    np.save(tmp_path / "momenta.npy", momenta.ravel())
    with pytest.raises(ValueError, match=r"a float array \(classes, width\), not float32 \(56,\)"):
        open_momenta(str(tmp_path / "momenta.npy"), CLASSES)


class TestRefusals:
    def refuse(self, path, message, **options):
        with pytest.raises((ValueError, OSError), match=message):
            open_class_weights(str(path), **options)

    def test_nothing(self, tmp_path):
        self.refuse(tmp_path / "no.npy", "no.npy: there is no such file or folder")
        self.refuse(tmp_path, "it is no folder of a run or a state, and has no 0_centers.param")

    def test_another_number_of_classes(self, tmp_path, weights):
        np.save(tmp_path / "classes.npy", weights)
        message = "classes.npy: it holds 7 classes, and {} are needed: tools/classes.py"
        for count in (6, 8):
            self.refuse(tmp_path / "classes.npy", message.format(count), num_classes=count)

    def test_more_padding_than_there_can_be(self, tmp_path, weights):
        arrays = {f"fc7_{n}_weight": part for n, part in enumerate(shards_of(weights, 3))}
        path = save_model(tmp_path / "model", arrays)
        assert open_class_weights(path, 7).shape == (7, WIDTH)
        self.refuse(path, "it holds 9 classes, and 6 are needed", num_classes=6)

    def test_a_missing_shard(self, tmp_path, weights):
        path = save_model(tmp_path / "model", {"fc7_0_weight": weights, "fc7_2_weight": weights})
        self.refuse(path, "fc7_<number>_weight: number 1 is missing, although there is number 2")
        (tmp_path / "pfc").mkdir()
        save_centers(tmp_path / "pfc", weights, 3)
        (tmp_path / "pfc" / "0_centers.param").unlink()
        self.refuse(tmp_path / "pfc", "<rank>_centers.param: number 0 is missing")

    def test_a_model_without_classes(self, tmp_path):
        path = save_model(tmp_path / "model", {"fc1_weight": np.ones((4, 3))})
        self.refuse(path, "no class weights in it: .*ckpt_embedding = False")

    def test_other_content(self, tmp_path, weights):
        np.save(tmp_path / "labels.npy", np.arange(6).reshape(2, 3))
        self.refuse(
            tmp_path / "labels.npy", r"a float array \(classes, width\), not int64 \(2, 3\)"
        )
        np.save(tmp_path / "object.npy", np.array([{}], object), allow_pickle=True)
        self.refuse(tmp_path / "object.npy", "not a .npy file of numbers")
        (tmp_path / "some.params").write_text(json.dumps({}))
        self.refuse(tmp_path / "some.params", "not a parameter file, or not a whole one")
        save_centers(tmp_path, weights[:, :3], 2)
        nd.save(str(tmp_path / "2_centers.param"), nd.array(weights))
        self.refuse(tmp_path, r"rows of different widths can't be joined: \[3, 4\]")
