"""MXNet's ``.params`` files, written block by block, so that a full disk is an error, and read.

``nd.save`` returns without an error if the disk has no room for the last kilobytes, and it needs
each array as a whole. The files written here are the same, byte for byte, for arrays on ``cpu(0)``:

    uint64 0x112, uint64 0, uint64 number of arrays
    each array:  uint32 0xF993FAC9, int32 0 (dense), int32 number of axes, int64 length of each,
                 int32 1, int32 0 (for cpu(0)), int32 type, its numbers
    uint64 number of names
    each name:   uint64 number of bytes, UTF-8

Arrays on other devices are written as if on ``cpu(0)``: files don't depend on the devices.

Files are read here, too, and not by ``nd.load``: MXNet believes every number in a file, so that a
damaged one makes it crash or fill the memory. Older releases wrote arrays without the kind of
storage (0xF993FAC8), or only the number of axes, each of 4 bytes.
"""

from __future__ import annotations

import math
import os
import struct
from typing import IO, Any, Iterable, Mapping, NamedTuple

import numpy as np

from dsoftmax.recognition.common.files import AtomicFile, explain_full_disk
from dsoftmax.recognition.common.preflight import mxnet

_DENSE, _WITHOUT_STORAGE = (0xF993FAC9, 0xF993FACA), 0xF993FAC8
_MOST_AXES = 32
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
        If the file is damaged, is no parameter file, or holds arrays without names, or numbers that
        are NaN or infinite.
    """
    mx = mxnet()
    arrays = map_arrays(path)
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not _is_finite(array):
            raise ValueError(f"{os.fspath(path)}: {name} holds NaN or infinite numbers")
    return {
        name: mx.nd.array(array, mx.cpu(0), dtype=array.dtype) for name, array in arrays.items()
    }


def map_arrays(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Load arrays by name without reading them: each is a view of the file.

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
    except _FormatError as error:
        raise ValueError(f"{path}: not a parameter file, or not a whole one: {error}") from None


def map_npy(path: str | os.PathLike) -> np.ndarray:
    """Load an array of numbers from a ``.npy`` file without reading it: it is a view of the file.

    Raises
    ------
    ValueError
        If the file is damaged, or no ``.npy`` of numbers.
    """
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # numpy takes the header for Python, which can raise nearly anything
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise ValueError(
            f"{os.fspath(path)}: not a .npy file of numbers, or not a whole one ({reason})"
        ) from None


def _is_finite(array: np.ndarray) -> bool:
    """Say whether all numbers are finite: only then is their sum, which needs no memory."""
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.isfinite(np.sum(array, dtype=np.float64)))


class _FormatError(ValueError):
    """The bytes are no parameter file; says what was found."""


class _Reader:
    """Reads numbers from a file, never beyond its end."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.size = os.fstat(file.fileno()).st_size

    @property
    def place(self) -> int:
        return self._file.tell()

    def bytes(self, count: int, what: str) -> bytes:
        if count > self.size - self.place:
            raise _FormatError(
                f"{what} of {count} bytes at {self.place}, and it ends at {self.size}"
            )
        return self._file.read(count)

    def numbers(self, form: str, what: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}"), what))

    def skip(self, count: int) -> None:
        self._file.seek(count, os.SEEK_CUR)


def _map(path: str, file: IO[bytes]) -> tuple[list[str], list[np.ndarray]]:
    """Return the names and the arrays of a file."""
    reader = _Reader(file)
    magic, _, count = reader.numbers("3Q", "the beginning")
    if magic != 0x112:
        raise _FormatError(f"it begins with {magic:#x}")
    arrays = []
    for number in range(count):
        shape, dtype = _read_header(reader, f"array {number} of {count}")
        size = math.prod(shape) * dtype.itemsize
        start = reader.place
        if size > reader.size - start:
            raise _FormatError(
                f"array {number} of {count} has the shape {shape}, and the file ends before that"
            )
        reader.skip(size)
        arrays.append(np.memmap(path, dtype, "r", start, shape))
    (named,) = reader.numbers("Q", "the number of names")
    if named not in (0, count):
        raise _FormatError(f"{named} names of {count} arrays")
    names = []
    for number in range(named):
        (length,) = reader.numbers("Q", f"name {number}")
        try:
            names.append(reader.bytes(length, f"name {number}").decode())
        except UnicodeDecodeError:
            raise _FormatError(f"name {number} is no text") from None
    if reader.place != reader.size:
        raise _FormatError(f"{reader.size - reader.place} bytes after its end")
    return names, arrays


def _read_header(reader: _Reader, what: str) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and the type of the array that follows."""
    (kind,) = reader.numbers("I", what)
    if kind in _DENSE:
        storage, axes = reader.numbers("2i", what)
        if storage:
            raise _FormatError(f"{what} is sparse")
        form = "q"
    elif kind == _WITHOUT_STORAGE:
        (axes,) = reader.numbers("I", what)
        form = "q"
    else:
        axes, form = kind, "I"
    if not 0 < axes <= _MOST_AXES:
        raise _FormatError(f"{what} has {axes} axes")
    shape = reader.numbers(f"{axes}{form}", what)
    if min(shape) < 1:
        raise _FormatError(f"{what} has the shape {shape}")
    *_, number = reader.numbers("3i", what)
    if not 0 <= number < len(_TYPES):
        raise _FormatError(f"{what} is of type {number}, which is unknown")
    return shape, np.dtype(_TYPES[number])


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
