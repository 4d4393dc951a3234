import mxnet as mx
import numpy as np
import pytest

from dsoftmax import losses
from dsoftmax.recognition.common.arrays import (
    Blocks,
    load_arrays,
    map_arrays,
    save_arrays,
    size_of,
)


def test_files_are_those_of_mxnet(tmp_path, rng):
    arrays = {
        f"{dtype} {shape} é": mx.nd.array(rng.integers(0, 2, shape), dtype=dtype)
        for dtype in ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool")
        for shape in [(1,), (3, 2), (2, 1, 3, 4)]
    }
    arrays["transposed"] = mx.nd.array(rng.normal(size=(3, 5))).T
    mx.nd.save(str(tmp_path / "expected"), arrays)
    expected = (tmp_path / "expected").read_bytes()
    numpy_arrays = {name: array.asnumpy() for name, array in arrays.items()}
    for given in (arrays, numpy_arrays):
        save_arrays(tmp_path / "found", given)
        assert (tmp_path / "found").read_bytes() == expected
        assert size_of(given) == len(expected)


def test_an_array_in_blocks(tmp_path, rng):
    whole = rng.normal(size=(10, 4)).astype(np.float32)
    mx.nd.save(str(tmp_path / "expected"), {"a": mx.nd.array(whole), "b": mx.nd.ones(2)})
    blocks = Blocks((10, 4), (whole[start : start + 3] for start in range(0, 10, 3)))
    save_arrays(tmp_path / "found", {"a": blocks, "b": mx.nd.ones(2)})
    assert (tmp_path / "found").read_bytes() == (tmp_path / "expected").read_bytes()
    with pytest.raises(ValueError, match="a has 112 bytes, its shape needs 160"):
        save_arrays(tmp_path / "found", {"a": Blocks((10, 4), [whole[:7]])})


def test_arrays_of_another_device_are_the_same_file(tmp_path):
    for number in range(2):
        save_arrays(tmp_path / str(number), {"a": mx.nd.ones(2, ctx=mx.cpu(number))})
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()


def test_arrays_are_loaded_as_they_were_saved(tmp_path, rng):
    arrays = {"a": rng.normal(size=(3, 2)).astype(np.float32), "b": np.arange(5)}
    save_arrays(tmp_path / "file", arrays)
    loaded = load_arrays(tmp_path / "file")
    assert list(loaded) == ["a", "b"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name].asnumpy(), array)


def test_arrays_are_mapped_as_mxnet_loads_them(tmp_path, rng):
    arrays = {
        f"{dtype} {shape} é": mx.nd.array(rng.integers(0, 2, shape), dtype=dtype)
        for dtype in ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool")
        for shape in [(1,), (3, 2), (2, 1, 3, 4)]
    }
    mx.nd.save(str(tmp_path / "file"), arrays)
    mapped = map_arrays(tmp_path / "file")
    assert list(mapped) == list(arrays)
    for name, array in arrays.items():
        assert mapped[name].dtype == array.dtype
        np.testing.assert_array_equal(mapped[name], array.asnumpy())


@pytest.mark.parametrize("load", [load_arrays, map_arrays])
def test_files_that_cannot_be_loaded(tmp_path, load):
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError, match="file: there is no such file"):
        load(path)
    save_arrays(path, {"a": np.ones(1000, np.float32)})
    whole = path.read_bytes()
    for length in (0, 4, 30, 1000, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="file: not a parameter file, or not a whole one"):
            load(path)
    mx.nd.save(str(path), [mx.nd.ones(2)])
    with pytest.raises(ValueError, match="file: its parameters have no names"):
        load(path)


@pytest.mark.parametrize("missing", [1, 1000, 5000, 15000])
def test_a_disk_that_is_full_at_the_last_block(tmp_path, largest_file, missing):
    """MXNet's own `nd.save` returns without an error and leaves less than it was to write."""
    path, arrays = tmp_path / "file", {"a": mx.nd.ones(4000)}
    path.write_bytes(b"old")
    size = size_of(arrays)
    with largest_file(size - missing), pytest.raises(OSError, match=f"{size:,} bytes are needed"):
        save_arrays(path, arrays)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"
    with largest_file(size):
        save_arrays(path, arrays)
    assert mx.nd.load(str(path))["a"].shape == (4000,)


def test_a_trainer_on_a_full_disk(tmp_path, largest_file):
    head = losses.create("dsoftmax", num_classes=100, embedding_size=32)
    head.initialize()
    trainer = head.trainer("sgd", {"momentum": 0.9})
    trainer.save_states(tmp_path / "states")
    before = (tmp_path / "states").read_bytes()
    with largest_file(len(before) - 1), pytest.raises(OSError, match="bytes are needed"):
        trainer.save_states(tmp_path / "states")
    assert (tmp_path / "states").read_bytes() == before
