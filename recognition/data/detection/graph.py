"""The outputs of an ONNX file, read without the libraries that run it.

An ONNX file is a protobuf message: fields one after the other, each with its number and kind. Three
of the numbers are all that is needed here.
"""

from __future__ import annotations

from typing import Iterator

from dsoftmax.recognition.data.detection.base import DetectorError

POINTER = b"version https://git-lfs"  # how a file begins that Git LFS puts in place of a large one
GRAPH, OUTPUT, NAME = 7, 12, 1  # fields of ModelProto, GraphProto and ValueInfoProto
VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5  # kinds of fields


def read_outputs(path: str) -> list[str]:
    """Return the names of the outputs of an ONNX file, in its order."""
    with open(path, "rb") as file:
        content = memoryview(file.read())
    try:
        names = [
            bytes(name).decode()
            for graph in _fields(content, GRAPH)
            for output in _fields(graph, OUTPUT)
            for name in _fields(output, NAME)
        ]
    except (ValueError, IndexError):
        names = []
    if content[: len(POINTER)] == POINTER:
        raise DetectorError(
            f"{path} is a pointer of Git LFS, not the network itself: fetch it by `git lfs pull`"
        )
    if not names:
        raise DetectorError(f"{path} is no ONNX file, or a damaged one")
    return names


def _fields(message: memoryview, wanted: int) -> Iterator[memoryview]:
    """Yield the content of all fields with one number, of those that hold bytes."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            length, place = 0, _varint(message, place)[1]
        elif kind == BYTES:
            length, place = _varint(message, place)
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            length = 8 if kind == EIGHT_BYTES else 4
        else:
            raise ValueError(f"no field is of kind {kind}")
        if place + length > len(message):
            raise ValueError("the message is cut off")
        if number == wanted and kind == BYTES:
            yield message[place : place + length]
        place += length


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """Read a number of 7 bits per byte, the lowest first; return it and the place behind it."""
    number = shift = 0
    while True:
        byte = message[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place
        shift += 7
