"""Labelled face images in insightface's ``train.rec`` / ``train.idx`` / ``property``.

Three styles are read alike:

*identity header*
    Key 0 has no image; its label ``[a, b]`` says that keys ``1 .. a-1`` are images and keys
    ``a .. b-1`` identities, each the range of its images' keys.
*plain*
    Every key is an image.
*unindexed*
    There is no ``.idx``: the reader walks over the whole file.

Labels are stored as float32, exact up to 2^24. A header that counts more images than that is not
trusted: the reader then takes the labels from the image records themselves.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import os
import re
import warnings
from array import array
from typing import Iterable, NamedTuple

import numpy as np

from dsoftmax.recognition.common.files import AtomicFile, open_text
from dsoftmax.recognition.data.identities import FILE_NAME, Named, read_names, write_identities
from dsoftmax.recognition.data.images import ImageError, decode
from dsoftmax.recognition.data.recordio import (
    RANGE_BYTES,
    Headers,
    RecordError,
    RecordFile,
    pack_image,
    pack_range,
    write_record,
)

FLOAT32_EXACT = 1 << 24
LONGEST_SIDE = 4096  # of images of faces

logger = logging.getLogger(__name__)


class Property(NamedTuple):
    """The first line of a dataset's ``property`` file."""

    num_classes: int
    height: int
    width: int


def read_property(path: str) -> Property | None:
    """Read a ``property`` file; None where there is none. Lines after the first are ignored."""
    if not os.path.exists(path):
        return None
    with open_text(path) as file:
        line = file.readline().strip()
    try:
        num_classes, height, width = (int(field) for field in line.split(","))
    except ValueError:
        raise ValueError(
            f"{path}: the first line must read num_classes,height,width (like 85742,112,112), not "
            f"{line[:80]!r}"
        ) from None
    if not (0 < num_classes <= FLOAT32_EXACT and 0 < height <= LONGEST_SIDE >= width > 0):
        raise ValueError(
            f"{path}: {num_classes} classes of {height}x{width} pixels: a dataset has 1 to "
            f"{FLOAT32_EXACT} classes, and images of up to {LONGEST_SIDE} pixels a side"
        )
    return Property(num_classes, height, width)


def find_rec(path: str) -> str:
    """Resolve a dataset's folder, ``.rec`` file or prefix to its ``.rec`` file."""
    path = os.fspath(path)
    candidates = [os.path.join(path, "train.rec"), path, f"{path}.rec"]
    for candidate in candidates:
        if candidate.endswith(".rec") and os.path.isfile(candidate):
            return candidate
    if os.path.isdir(path):
        inside = sorted(os.listdir(path))
        raise FileNotFoundError(
            f"{path}: the folder has no train.rec; it holds {', '.join(inside[:8]) or 'nothing'}"
            f"{', ...' if len(inside) > 8 else ''}"
        )
    raise FileNotFoundError(f"{path}: there is no such folder or .rec file")


class Records:
    """The images of a dataset and their labels, whichever style its files have.

    Images are numbered ``0 .. len - 1`` in the order of their keys. All methods may be called
    from several threads.

    Parameters
    ----------
    path : str
        The dataset's folder, its ``.rec`` file, or the prefix of both files.

    Attributes
    ----------
    keys : (n,) int64
        Each image's key; where there is no ``.idx``, its number in the file.
    style : {"identity header", "plain", "unindexed"}
    property : Property or None
        Content of the ``property`` file in the same folder.

    Examples
    --------
    >>> records = Records(folder)
    >>> label, encoded = records.read(0)
    """

    def __init__(self, path: str):
        self.path = find_rec(path)
        self.file = RecordFile(self.path)
        self.property = read_property(os.path.join(os.path.dirname(self.path), "property"))
        self._labels_by_range: np.ndarray | None = None
        self._index_path = f"{self.path[:-4]}.idx"
        if os.path.exists(self._index_path):
            keys, offsets = self._read_index(self._index_path)
            self._check_end(keys, offsets)
            self._take_indexed(keys, offsets)
        else:
            logger.warning("%s is missing: walking over %s instead", self._index_path, self.path)
            self._take_images(*self._walk())
            self.style = "unindexed"
        if not len(self):
            raise RecordError(f"{self.path}: there is no image in it")

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"Records({self.path!r}: {len(self)} images, {self.style})"

    def read(self, image: int) -> tuple[int, np.ndarray]:
        """Return the label and the encoded bytes, uint8 (n,), of one image."""
        try:
            label, encoded = self.file.read_image(int(self.offsets[image]))
        except RecordError as error:
            raise RecordError(f"image {image} (key {self.keys[image]}) of {error}") from None
        return self._integer_label(label, image), encoded

    @functools.cached_property
    def labels(self) -> np.ndarray:
        """Every image's label, (n,) int64.

        Where a trusted header says which images belong together, this reads one image per
        identity; otherwise all images.
        """
        if self._labels_by_range is not None:
            return self._labels_by_range
        return self._checked_labels(self.file.headers(self.offsets).label)

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """Whom labels stand for, by ``identities.csv`` in the same folder; else empty."""
        return read_names(os.path.dirname(self.path))

    @property
    def num_classes(self) -> int:
        """Number of classes a head needs: by the labels, or by `property` if that is more."""
        labelled = int(self.labels.max()) + 1
        return max(labelled, self.property.num_classes) if self.property else labelled

    @functools.cached_property
    def image_size(self) -> tuple[int, int]:
        """Height and width by `property`, or of the first image if there is no such file."""
        if self.property:
            return self.property.height, self.property.width
        try:
            return decode(self.read(0)[1]).shape[:2]
        except ImageError as error:
            raise RecordError(
                f"{self.path}: the image size is unknown: there is no property file beside it, and "
                f"the first image is broken ({error})"
            ) from None

    def _read_index(self, path: str) -> tuple[np.ndarray, np.ndarray]:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # numpy's word for a bad number
            numbers = np.fromstring(text, np.int64, sep=" ")
        if numbers.size != 2 * text.count("\n") + 2 * (not text.endswith("\n")):
            for number, line in enumerate(text.splitlines(), 1):
                if not re.fullmatch(r"\s*(\d+\s+\d+)?\s*", line):
                    raise RecordError(f"{path}: line {number} must be key, tab, offset: {line!r}")
        if not numbers.size:
            raise RecordError(f"{path} is empty; remove it to read the .rec without an index")
        keys, offsets = numbers.reshape(-1, 2).T
        order = np.argsort(keys, kind="stable")
        keys, offsets = keys[order], offsets[order]
        repeated = keys[1:][keys[1:] == keys[:-1]]
        if repeated.size:
            raise RecordError(f"{path}: the key {repeated[0]} is in more than one line")
        if offsets.max() >= self.file.size:
            last = offsets.argmax()
            raise RecordError(
                f"{path} puts key {keys[last]} at offset {offsets[last]}, but {self.path} ends at "
                f"{self.file.size}: the .rec is cut off or the .idx belongs to another one"
            )
        return keys, np.ascontiguousarray(offsets)

    def _check_end(self, keys: np.ndarray, offsets: np.ndarray) -> None:
        """Refuse an index that ends before the file does."""
        last = offsets.argmax()
        try:
            end = self.file.end(int(offsets[last]))
        except RecordError as error:
            raise RecordError(
                f"{self._index_path} does not fit at key {keys[last]}: {error}; the .rec is "
                "damaged or cut off, or the .idx belongs to another one"
            ) from None
        if end >= self.file.size:
            return
        content = f"{self.file.size - end} bytes after the last of them"
        with contextlib.suppress(RecordError):  # key 0, which counts all, usually comes last
            header = self.file.headers(np.array([self.file.size - RANGE_BYTES]))
            if _are_ranges(header)[0] and header.label2[0] > len(keys):
                content = f"{header.label2[0]:.0f} records by its header"
        raise self._cut_index(len(keys), content)

    def _cut_index(self, entries: int, content: str) -> RecordError:
        return RecordError(
            f"{self._index_path} has {entries} entries, but {self.path} has {content}: the index "
            "is cut off or belongs to another file; write a new one with tools/rec_info.py --input "
            f"{self.path} --rebuild-index"
        )

    def _take_indexed(self, keys: np.ndarray, offsets: np.ndarray) -> None:
        header = self.file.headers(offsets[:1]) if keys[0] == 0 else None
        if header is None or not _are_ranges(header)[0]:
            self.style = "plain"
            self.keys, self.offsets = keys, offsets
            return
        self.style = "identity header"
        end_of_images, end_of_identities = float(header.label[0]), float(header.label2[0])
        if max(end_of_images, end_of_identities) > FLOAT32_EXACT:
            self._take_images(keys, offsets)
            return
        if len(keys) != end_of_identities:
            raise self._cut_index(len(keys), f"{end_of_identities:.0f} records by its header")
        images = slice(*np.searchsorted(keys, [1, end_of_images]))
        identities = slice(*np.searchsorted(keys, [end_of_images, end_of_identities]))
        self.keys, self.offsets = keys[images], offsets[images]
        self._labels_by_range = self._label_ranges(offsets[identities])
        if self._labels_by_range is None:
            logger.warning(
                "%s: the identity records do not fit the images; using the images' labels instead",
                self.path,
            )

    def _take_images(self, keys: np.ndarray, offsets: np.ndarray) -> None:
        has_image = ~self.file.headers(offsets).is_empty
        self.keys, self.offsets = keys[has_image], offsets[has_image]

    def _walk(self) -> tuple[np.ndarray, np.ndarray]:
        offsets = self.file.scan()
        return np.arange(len(offsets)), offsets

    def _label_ranges(self, identity_offsets: np.ndarray) -> np.ndarray | None:
        """Label all images by the ranges of identities; None if the ranges are inconsistent."""
        ranges = self.file.headers(identity_offsets)
        first = np.searchsorted(self.keys, ranges.label)
        end = np.searchsorted(self.keys, ranges.label2)
        count = end - first
        order = np.argsort(first, kind="stable")
        first, end, count = first[order], end[order], count[order]
        tiles = np.array_equal(np.cumsum(count), end) and (count > 0).all()
        if not tiles or count.sum() != len(self):
            return None
        labels = self._checked_labels(self.file.headers(self.offsets[first]).label, first)
        labels_of_last = self._checked_labels(
            self.file.headers(self.offsets[end - 1]).label, end - 1
        )
        if not np.array_equal(labels, labels_of_last):
            return None
        return np.repeat(labels, count)

    def _checked_labels(self, labels: np.ndarray, images: np.ndarray | None = None) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            whole = labels.astype(np.int64)
        bad = np.flatnonzero((whole != labels) | (whole < 0) | (whole > FLOAT32_EXACT))
        if bad.size:
            image = int(bad[0] if images is None else images[bad[0]])
            self._integer_label(float(labels[bad[0]]), image)  # raises
        return whole

    def _integer_label(self, label: float, image: int) -> int:
        if not (0 <= label <= FLOAT32_EXACT and float(label).is_integer()):
            raise RecordError(
                f"{self.path}: image {image} (key {self.keys[image]}) at offset "
                f"{self.offsets[image]} has the label {label}, not a class number"
            )
        return int(label)


def _are_ranges(headers: Headers) -> np.ndarray:
    """Return which records hold a range of keys, (n,) bool.

    Images can have array labels, too; a range is a record without an image.
    """
    return (headers.flag >= 2) & headers.is_empty


def rebuild_index(path: str) -> int:
    """Write a new ``.idx`` for a dataset, by walking over its ``.rec``.

    Keys are numbered in the order of the file, as all writers do. If there are identities, key 0 is
    the first record or the last one.

    Parameters
    ----------
    path : str
        See `Records`.

    Returns
    -------
    int
        The number of records.
    """
    path = find_rec(path)
    file = RecordFile(path)
    offsets = file.scan()
    count = len(offsets)
    ends = file.headers(offsets[[0, -1]])
    is_header = _are_ranges(ends) & (ends.label2 == np.float32(count))
    if _are_ranges(ends).any() and not is_header.any():
        raise RecordError(
            f"{path}: neither its first nor its last record counts {count} records: it is cut off, "
            "or its keys are in another order. Without an .idx its images can be read"
        )
    keys = itertools.chain(range(1, count), [0]) if is_header[1] else range(count)
    _write_index(f"{path[:-4]}.idx", keys, offsets)
    return count


def _write_index(path: str, keys: Iterable[int], offsets: Iterable[int]) -> None:
    with AtomicFile(path, "w") as index:
        index.writelines(f"{key}\t{offset}\n" for key, offset in zip(keys, offsets))


class RecordWriter:
    """Writes a dataset in the identity-header style, complete or not at all.

    Images must be grouped by identity. The files have temporary names until a clean exit; the
    ``.rec`` gets its name last, so that the others exist wherever it does.

    Parameters
    ----------
    folder : str
        For ``train.rec``, ``train.idx`` and ``property``.
    image_size : (int, int)
        Height and width, for ``property``.
    overwrite : bool
        Replace an existing dataset; otherwise an existing one is an error.
    identity_header : bool
        Without it the images may come in any order and the file holds only images, so that MXNet's
        ``ImageRecordIter`` and other sequential readers can read it.

    Attributes
    ----------
    names : dict of int to str
        Whom labels stand for, if they have names, for ``identities.csv``.

    Examples
    --------
    >>> with RecordWriter(f"{tmp}/new", image_size=(112, 112)) as writer:
    ...     writer.add(0, jpeg)
    """

    def __init__(
        self,
        folder: str,
        image_size: tuple[int, int] = (112, 112),
        overwrite: bool = False,
        identity_header: bool = True,
    ):
        self.folder = os.fspath(folder)
        self.image_size = image_size
        self.identity_header = identity_header
        self.num_images = 0
        self.names: dict[int, str] = {}
        self._rec_path = os.path.join(self.folder, "train.rec")
        if os.path.exists(self._rec_path) and not overwrite:
            raise FileExistsError(f"{self._rec_path} exists; choose another folder or overwrite it")
        self._rec = AtomicFile(self._rec_path)
        self._offset = 0
        self._offsets = array("q")
        self._first_key_by_label: dict[int, int] = {}
        self._images_by_label: collections.Counter[int] = collections.Counter()
        self._label = -1

    @property
    def num_identities(self) -> int:
        """Number of identities added so far."""
        return len(self._first_key_by_label)

    def add(self, label: int, image: bytes) -> None:
        """Append an encoded image of class `label`."""
        if len(image) == 0:
            raise ValueError(f"an image of class {label} has no bytes")
        if not (0 <= label < FLOAT32_EXACT and label == int(label)):
            raise ValueError(f"labels are whole numbers from 0 to {FLOAT32_EXACT - 1}, not {label}")
        key = self.num_images + self.identity_header
        if label != self._label:
            if label in self._first_key_by_label and self.identity_header:
                raise ValueError(
                    f"class {label} comes a second time after class {self._label}: "
                    "images must be grouped by identity"
                )
            self._label = label
            self._first_key_by_label.setdefault(label, key)
        self._write(pack_image(label, key, bytes(image)))
        self._images_by_label[label] += 1
        self.num_images += 1

    def _write(self, payload: bytes) -> None:
        self._offsets.append(self._offset)
        self._offset += write_record(self._rec.stream, payload)

    def _finish(self) -> None:
        if not self.num_images:
            raise ValueError(f"no image was given for {self._rec_path}")
        keys = self._write_identities() if self.identity_header else range(self.num_images)
        if os.path.exists(self._rec_path):  # an old .rec must never lie beside the new index
            os.unlink(self._rec_path)
        _write_index(os.path.join(self.folder, "train.idx"), keys, self._offsets)
        with AtomicFile(os.path.join(self.folder, "property"), "w") as file:
            num_classes = max([*self._first_key_by_label, *self.names]) + 1
            file.write("{},{},{}\n".format(num_classes, *self.image_size))
        self._write_names()
        self._rec.commit()

    def _write_names(self) -> None:
        path = os.path.join(self.folder, FILE_NAME)
        if self.names:
            counts = self._images_by_label
            people = (
                Named(label, self.names[label], counts[label]) for label in sorted(self.names)
            )
            write_identities(path, people)
        elif os.path.exists(path):  # of the dataset that this one replaces
            os.unlink(path)

    def _write_identities(self) -> Iterable[int]:
        """Append the identity records and key 0; return the keys of all records in file order."""
        firsts = list(self._first_key_by_label.values())
        end_of_images = self.num_images + 1
        end_of_identities = end_of_images + len(firsts)
        ranges = zip(firsts, [*firsts[1:], end_of_images])
        for key, (first, end) in enumerate(ranges, start=end_of_images):
            self._write(pack_range(first, end, key))
        self._write(pack_range(end_of_images, end_of_identities, 0))
        return itertools.chain(range(1, end_of_identities), [0])

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is not None:
            self._rec.abort()
            return
        try:
            self._finish()
        except BaseException:
            self._rec.abort()
            raise
