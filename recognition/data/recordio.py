"""The RecordIO container: framed payloads in one file, read through a memory map.

A record is a magic word, a word of 3 bits *continuation flag* and 29 bits *length*, and the
payload, padded to 4 bytes. A payload that contains the magic word on a 4-byte boundary is stored
in parts, cut where the word stood. An image payload is a header (flag, label, id, id2), `flag`
more labels as float32 where the label is an array, and the encoded image.
"""

from __future__ import annotations

import os
import struct
from typing import IO, NamedTuple

import numpy as np

MAGIC = 0xCED7230A
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_FRAME = struct.Struct("<II")
_HEADER = struct.Struct("<IfQQ")
_LENGTH_BITS = 29
_MAX_LENGTH = (1 << _LENGTH_BITS) - 1
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_HEADERS_PER_GATHER = 1 << 16


class RecordError(ValueError):
    """The file is damaged, or no record file."""


class Headers(NamedTuple):
    """Fields of the headers of many records, one entry per record."""

    flag: np.ndarray  # (n,) uint32: the number of labels of an array label, 0 for a scalar
    label: np.ndarray  # (n,) float32: the scalar label, or the array's first
    label2: np.ndarray  # (n,) float32: the array's second label, else undefined
    is_empty: np.ndarray  # (n,) bool: no image follows the header


def pack_image(label: float, key: int, image: bytes) -> bytes:
    """Build the payload of an image with a scalar label."""
    return _HEADER.pack(0, label, key, 0) + image


def pack_range(first: float, end: float, key: int) -> bytes:
    """Build a payload without image whose label is the range ``[first, end)``."""
    return _HEADER.pack(2, 0.0, key, 0) + struct.pack("<ff", first, end)


RANGE_BYTES = _FRAME.size + len(pack_range(0, 0, 0))  # of a record in the file


def write_record(stream: IO[bytes], payload: bytes) -> int:
    """Append one record.

    Returns
    -------
    int
        The number of bytes written, so that the caller can compute the next record's offset.
    """
    if len(payload) > _MAX_LENGTH:
        raise ValueError(f"a record holds at most {_MAX_LENGTH} bytes, this one {len(payload)}")
    cuts = _aligned_magic_words(payload)
    starts = [0, *(cut + 4 for cut in cuts)]
    written = 0
    for part, (start, end) in enumerate(zip(starts, [*cuts, len(payload)])):
        if not cuts:
            continuation = _WHOLE
        elif part == 0:
            continuation = _FIRST
        else:
            continuation = _LAST if part == len(cuts) else _MIDDLE
        length = end - start
        stream.write(_FRAME.pack(MAGIC, continuation << _LENGTH_BITS | length))
        stream.write(payload[start:end])
        stream.write(b"\0" * (-length % 4))
        written += _FRAME.size + length + -length % 4
    return written


def _aligned_magic_words(payload: bytes) -> list[int]:
    places = []
    position = payload.find(_MAGIC_BYTES)
    while position >= 0:
        if position % 4 == 0:
            places.append(position)
        position = payload.find(_MAGIC_BYTES, position + 1)
    return places


class RecordFile:
    """Reads the records of a file by their offsets, from any number of threads.

    Parameters
    ----------
    path : str
        The ``.rec`` file. It is mapped into memory, so that opening it costs nothing.
    """

    def __init__(self, path: str):
        self.path = os.fspath(path)
        self.size = os.path.getsize(self.path)
        if self.size < _FRAME.size:
            raise RecordError(f"{self.path}: {self.size} bytes hold no record")
        # A plain array over the map: slicing a memmap costs ten times as much.
        self._data = np.asarray(np.memmap(self.path, np.uint8, mode="r"))
        self._buffer = memoryview(self._data)
        self._words = self._data[: self.size // 4 * 4].view("<u4")

    def read(self, offset: int) -> np.ndarray:
        """Return the payload of the record at `offset`, uint8 (n,): a view where it is whole."""
        continuation, start, end = self._frame(offset)
        if continuation == _WHOLE:
            return self._data[start:end]
        if continuation != _FIRST:
            raise self._error(offset, "is the middle of a record")
        parts = [self._buffer[start:end]]
        while continuation != _LAST:
            continuation, start, end = self._frame(end + -end % 4)
            if continuation not in (_MIDDLE, _LAST):
                raise self._error(offset, "misses its last part")
            parts.append(self._buffer[start:end])
        return np.frombuffer(_MAGIC_BYTES.join(parts), np.uint8)

    def read_image(self, offset: int) -> tuple[float, np.ndarray]:
        """Return the label (an array's first) and the encoded image, uint8 (n,)."""
        payload = self.read(offset)
        if len(payload) < _HEADER.size:
            raise self._error(offset, f"is {len(payload)} bytes long, too short for an image")
        flag, label, _, _ = _HEADER.unpack_from(payload)
        body = _HEADER.size + 4 * flag
        if len(payload) < body:
            raise self._error(offset, f"announces {flag} labels, more than its bytes")
        if flag:
            (label,) = struct.unpack_from("<f", payload, _HEADER.size)
        return label, payload[body:]

    def headers(self, offsets: np.ndarray) -> Headers:
        """Read the headers of many records at once.

        Parameters
        ----------
        offsets : (n,) int64

        Returns
        -------
        Headers
            Of arrays (n,).
        """
        chunks = [
            self._gather_headers(offsets[start : start + _HEADERS_PER_GATHER])
            for start in range(0, len(offsets), _HEADERS_PER_GATHER)
        ]
        if not chunks:
            return Headers(*(np.empty(0, kind) for kind in (np.uint32, "f4", "f4", bool)))
        return Headers(*(np.concatenate(parts) for parts in zip(*chunks)))

    def _gather_headers(self, offsets: np.ndarray) -> Headers:
        # Words: magic, frame, flag, label, id (2), id2 (2), first and second label of an array.
        inside = (offsets >= 0) & (offsets % 4 == 0) & (offsets + 32 <= self.size)
        if not inside.all():
            raise self._bad_offset(int(offsets[~inside][0]))
        places = offsets[:, None] // 4 + np.arange(10)
        words = self._words[np.minimum(places, len(self._words) - 1)]
        continuation = words[:, 1] >> _LENGTH_BITS
        length = (words[:, 1] & _MAX_LENGTH).astype(np.int64)
        for offset in offsets[(words[:, 0] != MAGIC) | (offsets + 8 + length > self.size)]:
            self._frame(int(offset))  # raises
        flag = words[:, 2].copy()
        first = np.ascontiguousarray(words[:, 8]).view("<f4")
        label = np.where(flag > 0, first, np.ascontiguousarray(words[:, 3]).view("<f4"))
        label2 = np.ascontiguousarray(words[:, 9]).view("<f4").copy()
        is_empty = (continuation == _WHOLE) & (length <= _HEADER.size + 4 * flag)
        # A record in parts may be cut inside its header; such records are rare and read one by one.
        for row in np.flatnonzero(continuation != _WHOLE):
            label[row], image = self.read_image(int(offsets[row]))
            is_empty[row] = len(image) == 0
        return Headers(flag, label, label2, is_empty)

    def scan(self) -> np.ndarray:
        """Walk over the whole file.

        Returns
        -------
        (n,) int64
            The offset of every record, in file order.
        """
        offsets = []
        offset = 0
        while offset < self.size:
            try:
                continuation, _, end = self._frame(offset)
            except RecordError as error:
                raise RecordError(f"record {len(offsets)} of {error}") from None
            if continuation in (_WHOLE, _FIRST):
                offsets.append(offset)
            offset = end + -end % 4
        return np.asarray(offsets, np.int64)

    def end(self, offset: int) -> int:
        """Return where the record at `offset` ends: where the next one begins."""
        continuation, _, end = self._frame(offset)
        while continuation in (_FIRST, _MIDDLE):
            continuation, _, end = self._frame(end + -end % 4)
        return end + -end % 4

    def _frame(self, offset: int) -> tuple[int, int, int]:
        if not 0 <= offset <= self.size - _FRAME.size or offset % 4:
            raise self._bad_offset(offset)
        magic, word = _FRAME.unpack_from(self._buffer, offset)
        if magic != MAGIC:
            raise self._error(offset, f"begins with {magic:#x}, not {MAGIC:#x}: it is damaged")
        start = offset + _FRAME.size
        end = start + (word & _MAX_LENGTH)
        if end > self.size:
            raise self._error(offset, f"is cut off: {end - self.size} of its bytes are missing")
        return word >> _LENGTH_BITS, start, end

    def _bad_offset(self, offset: int) -> RecordError:
        if offset > self.size - _FRAME.size:
            return self._error(offset, f"lies at or behind the file's end ({self.size} bytes)")
        return self._error(offset, "does not begin where a record can")

    def _error(self, offset: int, what: str) -> RecordError:
        return RecordError(f"{self.path}: the record at offset {offset} {what}")
