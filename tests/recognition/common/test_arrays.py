import contextlib
import struct

import mxnet as mx
import numpy as np
import pytest

from dsoftmax import losses
from dsoftmax.recognition.common.arrays import (
    Blocks,
    load_arrays,
    map_arrays,
    map_npy,
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


def old_file(arrays, header):
    """Write arrays as older releases of MXNet did; `header` makes what precedes the context."""
    content = struct.pack("<3Q", 0x112, 0, len(arrays))
    for array in arrays.values():
        content += header(array.shape) + struct.pack("<3i", 1, 0, 0) + array.tobytes()
    content += struct.pack("<Q", len(arrays))
    for name in arrays:
        content += struct.pack("<Q", len(name)) + name.encode()
    return content


@pytest.mark.parametrize(
    "header",
    [
        lambda shape: struct.pack(f"<II{len(shape)}q", 0xF993FAC8, len(shape), *shape),
        lambda shape: struct.pack(f"<I{len(shape)}I", len(shape), *shape),
    ],
    ids=["without storage", "axes alone"],
)
def test_files_of_older_releases(tmp_path, rng, header):
    arrays = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in (("a", (3, 2)), ("b", (4,)))
    }
    (tmp_path / "old").write_bytes(old_file(arrays, header))
    of_mxnet, loaded = mx.nd.load(str(tmp_path / "old")), load_arrays(tmp_path / "old")
    for name, array in arrays.items():
        np.testing.assert_array_equal(of_mxnet[name].asnumpy(), array)
        np.testing.assert_array_equal(loaded[name].asnumpy(), array)


@pytest.mark.parametrize(
    ("place", "number", "problem"),
    [
        (16, (1 << 40).to_bytes(8, "little"), "array 1 of"),  # arrays
        (24, b"\0\0\0\0", "0 axes"),  # no array's beginning
        (28, b"\1\0\0\0", "sparse"),
        (32, b"\xff\xff\xff\xff", "-1 axes"),
        (32, b"\xff\xff\xff\x7f", "2147483647 axes"),
        (36, (1 << 60).to_bytes(8, "little"), "ends before that"),  # the length of an axis
        (36, (-3).to_bytes(8, "little", signed=True), r"shape \(-3,\)"),
        (52, b"\x63\0\0\0", "type 99"),
        (68, (1 << 32).to_bytes(8, "little"), "4294967296 names of 1"),
        (76, (1 << 32).to_bytes(8, "little"), "name 0 of 4294967296 bytes"),
        (84, b"\xff", "no text"),
    ],
)
def test_every_number_of_a_file_is_checked(tmp_path, place, number, problem):
    save_arrays(tmp_path / "file", {"a": np.ones(3, np.float32)})
    content = bytearray((tmp_path / "file").read_bytes())
    content[place : place + len(number)] = number
    (tmp_path / "file").write_bytes(content)
    for load in (load_arrays, map_arrays):
        with pytest.raises(ValueError, match=f"file: not a parameter file, .*{problem}"):
            load(tmp_path / "file")


@pytest.mark.parametrize("flip", range(100))
def test_no_flipped_bit_does_harm(tmp_path, rng, flip):
    save_arrays(tmp_path / "file", {"a": np.ones((2, 3), np.float32), "b": np.arange(4)})
    content = bytearray((tmp_path / "file").read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    (tmp_path / "file").write_bytes(content)
    with contextlib.suppress(ValueError):  # and no other
        assert len(load_arrays(tmp_path / "file")) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_named(tmp_path, bad):
    save_arrays(tmp_path / "file", {"a": np.ones(3), "b": np.array([1, bad, -bad], np.float32)})
    with pytest.raises(ValueError, match="file: b holds NaN or infinite numbers"):
        load_arrays(tmp_path / "file")


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"PK\x03\x04" + content[4:],
        lambda content: content[:-1],
        lambda content: content[:30],
        lambda content: content.replace(b"False, 'shape'", b"False, ('shape"),
        lambda content: content.replace(b"(3, 2)", b"(3,-2)"),
        lambda content: content.replace(b"'<f4'", b"'|O' "),
        lambda content: content.replace(b"{", b"\xff"),
    ],
)
def test_a_damaged_npy_is_named(tmp_path, damage):
    path = tmp_path / "a.npy"
    np.save(path, np.ones((3, 2), np.float32))
    np.testing.assert_array_equal(map_npy(path), np.ones((3, 2)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"a\.npy: not a \.npy file of numbers"):
        map_npy(path)
