"""Verification packs: insightface's ``.bin``, a pickle of ``(images, issame)``.

A pickle can call any function of any module. This reader knows the few names that lists of encoded
images need, replaces them by stand-ins, and refuses all others before anything is called.
"""

from __future__ import annotations

import logging
import os
import pickle
import struct
from dataclasses import dataclass
from typing import IO, Callable, ClassVar, Sequence

import numpy as np

from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.recognition.data.identities import read_table, write_table
from dsoftmax.recognition.data.images import ImageError, load_rgb

ALLOWANCE = 1 << 20  # bytes

logger = logging.getLogger(__name__)


class PackError(ValueError):
    """The file is no verification pack, or could do harm."""


@dataclass(frozen=True)
class Pack:
    """Pairs of encoded images.

    Attributes
    ----------
    name : str
        The file's name without folder and ``.bin``, as printed in results.
    images : list of (n,) uint8 arrays
        Pair `p` is images ``2 p`` and ``2 p + 1``.
    issame : (pairs,) bool
    paths : sequence of str
        The files the images were read from, one per image; empty for a ``.bin``, which names none.
    people : (pairs, 2) str, optional
        Whom the images show, if that is known.
    """

    name: str
    images: list[np.ndarray]
    issame: np.ndarray
    paths: Sequence[str] = ()
    people: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.issame)

    def decode(self, image: int) -> np.ndarray:
        """Decode one image to (height, width, 3) uint8 in RGB."""
        try:
            return load_rgb(self.images[image])
        except ImageError as error:
            raise PackError(f"{self.name}: image {image} of pair {image // 2}: {error}") from None


def read_pack(path: str) -> Pack:
    """Read a ``.bin`` of any age: Python 2 or 3, any protocol, bytes, str or uint8 arrays.

    If ``<name>.people.csv`` lies beside it, the people in the pairs are known.
    """
    try:
        with open(path, "rb") as file:
            content = _PackUnpickler(file, encoding="bytes").load()
    except PackError as error:
        raise PackError(f"{path}: {error}") from None
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise PackError(f"{path}: not a readable pickle: {error or type(error).__name__}") from None
    try:
        images, issame = _check_content(content)
    except PackError as error:
        raise PackError(f"{path}: {error}") from None
    name = os.path.splitext(os.path.basename(path))[0]
    return Pack(name, images, issame, people=_read_people(path, issame))


def write_pack(
    path: str,
    images: Sequence[bytes],
    issame: Sequence[bool],
    people: Sequence[tuple[str, str]] | None = None,
) -> None:
    """Write a ``.bin`` of plain bytes and bools, which insightface's tools can read.

    Parameters
    ----------
    path : str
    images : sequence of bytes
        Encoded images, two per pair.
    issame : sequence of bool
        One entry per pair.
    people : sequence of (str, str), optional
        Whom the images show, for ``<name>.people.csv`` beside the ``.bin``, which has no place for
        it.
    """
    content = [bytes(image) for image in images], [bool(same) for same in issame]
    _check_content(content)
    beside = people_path(path)
    if os.path.exists(beside):  # of the pack that this one replaces
        os.unlink(beside)
    with AtomicFile(path) as file:
        pickle.dump(content, file, protocol=4)
    if people is not None:
        write_table(beside, ("first", "second"), people)


def people_path(path: str) -> str:
    """Return where the people of a ``.bin`` are listed."""
    return f"{os.path.splitext(path)[0]}.people.csv"


def _read_people(path: str, issame: np.ndarray) -> np.ndarray | None:
    beside = people_path(path)
    if not os.path.exists(beside):
        return None
    rows = [(row.get("first", ""), row.get("second", "")) for row in read_table(beside)]
    if [first == second for first, second in rows] != issame.tolist():
        logger.warning("%s is ignored: it does not belong to %s", beside, path)
        return None
    return np.array(rows)


def _check_content(content) -> tuple[list[np.ndarray], np.ndarray]:
    if not (isinstance(content, (tuple, list)) and len(content) == 2):
        raise PackError(f"a pack is (images, issame), this is a {_describe(content)}")
    images, issame = (_as_list(part) for part in content)
    if not issame:
        raise PackError("it holds no pair")
    if len(images) != 2 * len(issame):
        raise PackError(f"{len(issame)} pairs need {2 * len(issame)} images, it has {len(images)}")
    for pair, same in enumerate(issame):
        if not (isinstance(same, (bool, int)) and same in (0, 1)):
            raise PackError(f"pair {pair}: issame must be True or False, not {_describe(same)}")
    encoded = [_as_bytes(image, number) for number, image in enumerate(images)]
    return encoded, np.array(issame, bool)


def _as_list(part) -> list:
    if isinstance(part, _Array) and part.array.ndim == 1:
        return part.array.tolist()
    if isinstance(part, (list, tuple)):
        return list(part)
    raise PackError(f"a pack is two lists, not a {_describe(part)}")


def _as_bytes(image, number: int) -> np.ndarray:
    if isinstance(image, str):  # Python 2 bytes, read as latin1 and pickled again by Python 3
        try:
            image = image.encode("latin1")
        except UnicodeEncodeError:
            raise PackError(f"image {number} is text, not an encoded image") from None
    if isinstance(image, _Array) and image.array.dtype == np.uint8:
        encoded = image.array.ravel()
    elif isinstance(image, (bytes, bytearray)):
        encoded = np.frombuffer(image, np.uint8)
    else:
        raise PackError(f"image {number} must be bytes or a uint8 array, not {_describe(image)}")
    if not encoded.size:
        raise PackError(f"image {number} has no bytes")
    return encoded


def _describe(thing) -> str:
    if isinstance(thing, _Array):
        return f"{thing.array.dtype} array of shape {thing.array.shape}"
    if isinstance(thing, (tuple, list)):
        return f"{type(thing).__name__} of {len(thing)}"
    return type(thing).__name__


# --- The stand-ins. A pickle can call them, and set the state of their results; so they check their
# --- arguments, hold nothing but values, and can't be changed themselves.


class _StandIn:
    """A function that a pickle may name, without attributes that a pickle could set."""

    __slots__ = ("_build",)

    def __init__(self, build):
        object.__setattr__(self, "_build", build)

    def __call__(self, *arguments):
        return self._build(*arguments)

    def __setattr__(self, *_):
        raise PackError("the pickle tries to change a function")

    def __setstate__(self, _):
        raise PackError("the pickle tries to change a function")


class _DType:
    """Stands for ``numpy.dtype``; bytes, bools and whole numbers are all a pack needs."""

    __slots__ = ("dtype",)
    LEGAL = ("u1", "uint8", "b1", "bool", "i1", "i2", "i4", "i8", "u2", "u4", "u8")

    def __init__(self, name, *_):
        name = name.decode("latin1") if isinstance(name, bytes) else name
        if name not in self.LEGAL:
            raise PackError(f"refused: an array of {name!r}; a pack holds uint8 arrays and bools")
        self.dtype = np.dtype(name)

    def __setstate__(self, state):
        order = state[1]
        if order in ("<", ">", b"<", b">"):
            order = order.decode() if isinstance(order, bytes) else order
            self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """Stands for ``numpy.ndarray`` while a pickle fills it in."""

    __slots__ = ("array",)

    def __init__(self, *_):
        self.array = np.empty(0, np.uint8)

    def __setstate__(self, state):
        _, shape, dtype, is_fortran, raw = state
        self.array = _build_array(raw, dtype, shape, "F" if is_fortran else "C").array


def _build_array(raw, dtype, shape, order="C") -> _Array:
    raw = raw.encode("latin1") if isinstance(raw, str) else raw
    if not (isinstance(dtype, _DType) and isinstance(raw, (bytes, bytearray))):
        raise PackError("refused: an array that is not plain bytes")
    order = order.decode() if isinstance(order, bytes) else order
    built = _Array()
    built.array = np.frombuffer(raw, dtype.dtype).reshape(shape, order=order)
    return built


def _build_scalar(dtype, raw):
    return _build_array(raw, dtype, ()).array.item()


def _encode_latin1(text, encoding="latin1"):
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise PackError("refused: an encoding that is not latin1")
    return text.encode("latin1")


def _build_bytes(content=b"", *encoding):
    return content if isinstance(content, bytes) else _encode_latin1(content, *encoding)


_LEGAL_NAMES = {
    # How Python 3 writes bytes in protocols 0 to 2.
    ("_codecs", "encode"): _encode_latin1,
    ("builtins", "bytes"): _build_bytes,
    ("builtins", "bytearray"): _build_bytes,
    # How numpy writes arrays and scalars; numpy 2 renamed the package.
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    **{
        (f"numpy.{core}.{module}", name): stand_in
        for core in ("core", "_core")
        for module, name, stand_in in [
            ("multiarray", "_reconstruct", _Array),
            ("multiarray", "scalar", _build_scalar),
            ("numeric", "_frombuffer", _build_array),
        ]
    },
}


class _BoundedFile:
    """A file that refuses to read more than is left of it, before memory is set aside for it."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.size = os.fstat(file.fileno()).st_size
        self.readline = file.readline

    def read(self, count: int) -> bytes:
        left = self.size - self._file.tell()
        if count > left:
            raise PackError(f"it announces {count} bytes where {left} are left: it is cut off")
        return self._file.read(count)


def _within(budget: list[int], build: Callable) -> Callable:
    """Return the function, but refuse to make more bytes with it than are left in a budget."""

    def build_some(*arguments):
        sizes = [len(part) for part in arguments if isinstance(part, (str, bytes, bytearray))]
        budget[0] -= sum(sizes)
        if budget[0] < 0:
            raise PackError("refused: the pickle makes far more of its bytes than there are")
        return build(*arguments)

    return build_some


# The unpickler in Python, not its twin in C: that one allocates memory for the largest memo number
# a pickle claims to use, so that nine bytes could take all the machine has.
class _PackUnpickler(pickle._Unpickler):
    """Unpickles a file without calling anything of it.

    Parameters
    ----------
    file : binary file
    **options
        Of ``pickle.Unpickler``.
    """

    def __init__(self, file: IO[bytes], **options):
        file = _BoundedFile(file)
        super().__init__(file, **options)
        # What functions may make of the file, in bytes: they copy parts of it, some of them twice.
        self._budget = [2 * file.size + ALLOWANCE]

    def _load_bytearray(self) -> None:
        """Read before anything is allocated, unlike the method that this one replaces."""
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(length)))

    dispatch: ClassVar[dict] = {
        **pickle._Unpickler.dispatch,
        pickle.BYTEARRAY8[0]: _load_bytearray,
    }

    def find_class(self, module, name):
        module = {"__builtin__": "builtins"}.get(module, module)
        stand_in = _LEGAL_NAMES.get((module, name))
        if stand_in is None:
            raise PackError(
                f"refused: the pickle asks for {module}.{name}, which no verification pack needs; "
                "nothing of it was run. Don't use this file"
            )
        return _StandIn(_within(self._budget, stand_in))

    def persistent_load(self, _):
        raise PackError("refused: the pickle refers to objects outside the file")
