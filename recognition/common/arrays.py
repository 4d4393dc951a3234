"""MXNet's ``.params`` files, written block by block, so that a full disk is an error, and read.

``nd.save`` returns without an error if the disk has no room for the last kilobytes, and it needs
each array as a whole. The files written here are the same, byte for byte, for arrays on ``cpu(0)``:

    uint64 0x112, uint64 0, uint64 number of arrays
    each array:  uint32 0xF993FAC9, int32 0 (dense), int32 number of axes, int64 length of each,
                 int32 1, int32 0 (for cpu(0)), int32 type, its numbers
    uint64 number of names
    each name:   uint64 number of bytes, UTF-8

Arrays on other devices are written as if on ``cpu(0)``: files don't depend on the devices.
"""

from __future__ import annotations

import math
import os
import struct
from typing import IO, Any, Iterable, Mapping, NamedTuple

import numpy as np

from dsoftmax.recognition.common.files import AtomicFile, explain_full_disk
from dsoftmax.recognition.common.preflight import mxnet

_TYPES = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool")  # 0, 1, ...


class Blocks(NamedTuple):
    """A float32 array too large to be copied: its rows are read once, while they are written.

    Attributes
    ----------
    shape : (n, ...)
    parts : iterable of (some, ...)
        The rows of the array, in order.
    """

    shape: tuple[int, ...]
    parts: Iterable[np.ndarray]
    dtype = np.dtype(np.float32)


def save_arrays(path: str, arrays: Mapping[str, Any]) -> None:
    """Save arrays by name, in the format of ``nd.save``; the file is complete or absent.

    Parameters
    ----------
    path : str
    arrays : dict of str to NDArray, numpy array or Blocks
    """
    with explain_full_disk(path, size_of(arrays)), AtomicFile(path) as file:
        write_arrays(file, arrays)


def load_arrays(path: str | os.PathLike) -> dict[str, Any]:
    """Load arrays by name, as `save_arrays` or MXNet saved them.

    Parameters
    ----------
    path : path

    Returns
    -------
    dict of str to NDArray
        On ``cpu(0)``.

    Raises
    ------
    ValueError
        If the file is damaged, is no parameter file, or holds arrays without names.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: there is no such file")
    mx = mxnet()
    try:
        arrays = mx.nd.load(path)
    except mx.MXNetError:
        raise ValueError(f"{path}: not a parameter file, or not a whole one") from None
    if not isinstance(arrays, dict):
        raise ValueError(f"{path}: its parameters have no names")
    return arrays


def map_arrays(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Load arrays that `save_arrays` saved without reading them: each is a view of the file.

    For arrays that MXNet can't hold, or memory not twice.

    Raises
    ------
    ValueError
        If the file is damaged, is no parameter file, or holds arrays without names.
    """
    names, arrays = map_list(path)
    if len(names) != len(arrays):
        raise ValueError(f"{os.fspath(path)}: its parameters have no names")
    return dict(zip(names, arrays))


def map_list(path: str | os.PathLike) -> tuple[list[str], list[np.ndarray]]:
    """Load arrays as `map_arrays` does, and their names: none if ``nd.save`` was given none."""
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        with open(path, "rb") as file:
            return _map(path, file)
    except (struct.error, ValueError, IndexError, MemoryError):
        raise ValueError(f"{path}: not a parameter file, or not a whole one") from None


def _map(path: str, file: IO[bytes]) -> tuple[list[str], list[np.ndarray]]:
    """Return the names and the arrays of a file; raise if it is not as `write_arrays` writes it."""

    def read(form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))

    size = os.fstat(file.fileno()).st_size
    magic, _, count = read("3Q")
    if magic != 0x112:
        raise ValueError("not a parameter file")
    arrays = []
    for _ in range(count):
        kind, storage, axes = read("Iii")
        if kind != 0xF993FAC9 or storage or not 0 < axes < 32:
            raise ValueError("not a dense array")
        shape = read(f"{axes}q")
        dtype = np.dtype(_TYPES[read("3i")[2]])
        start = file.tell()
        stop = start + math.prod(shape) * dtype.itemsize
        if min(shape) < 1 or stop > size:
            raise ValueError("the numbers are missing")
        file.seek(stop)
        arrays.append(np.memmap(path, dtype, "r", start, shape))
    (named,) = read("Q")
    names = [read(f"{read('Q')[0]}s")[0].decode() for _ in range(min(named, count))]
    if file.tell() != size:
        raise ValueError("not a whole file")
    return names, arrays


def write_arrays(file: IO[bytes], arrays: Mapping[str, Any]) -> None:
    """Write arrays by name to an open file, in the format of ``nd.save``."""
    file.write(struct.pack("<3Q", 0x112, 0, len(arrays)))
    for name, array in arrays.items():
        file.write(_header(array))
        written = 0
        for part in _parts_of(array):
            written += file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
        if written != _data_size(array):
            raise ValueError(f"{name} has {written} bytes, its shape needs {_data_size(array)}")
    file.write(_names(arrays))


def write_npy(file: IO[bytes], array: Blocks) -> None:
    """Write an array to an open file, block by block, in the format of ``np.save``."""
    header = {
        "descr": np.lib.format.dtype_to_descr(array.dtype),
        "fortran_order": False,
        "shape": array.shape,
    }
    np.lib.format.write_array_header_1_0(file, header)
    for part in array.parts:
        file.write(np.ascontiguousarray(part, array.dtype))


def size_of(arrays: Mapping[str, Any]) -> int:
    """Count the bytes that `write_arrays` writes."""
    each = (len(_header(array)) + _data_size(array) for array in arrays.values())
    return 24 + sum(each) + len(_names(arrays))


def _header(array) -> bytes:
    shape, kind = array.shape, _TYPES.index(np.dtype(array.dtype).name)
    return struct.pack(f"<Iii{len(shape)}q3i", 0xF993FAC9, 0, len(shape), *shape, 1, 0, kind)


def _names(arrays: Mapping[str, Any]) -> bytes:
    encoded = [name.encode() for name in arrays]
    each = (struct.pack("<Q", len(name)) + name for name in encoded)
    return struct.pack("<Q", len(encoded)) + b"".join(each)


def _data_size(array) -> int:
    return math.prod(array.shape) * np.dtype(array.dtype).itemsize


def _parts_of(array) -> Iterable[np.ndarray]:
    if isinstance(array, Blocks):
        return array.parts
    return [array] if isinstance(array, np.ndarray) else [array.asnumpy()]
