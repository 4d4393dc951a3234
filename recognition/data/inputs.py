"""What a user wants embedded, image by image: files, a folder, a list, a dataset, or a pack."""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Sequence

import numpy as np

from dsoftmax.recognition.data.folders import EXTENSIONS, Source, read_list, scan_folder
from dsoftmax.recognition.data.images import Face, FindLandmarks, ImageError, decode, face_of
from dsoftmax.recognition.data.packs import Pack, read_pack
from dsoftmax.recognition.data.recordio import RecordError
from dsoftmax.recognition.data.records import Records, find_rec

USUAL_SIZE = (112, 112)
LISTS = (".txt", ".csv", ".tsv", ".lst")


class Images:
    """Images in order, each with a name, and a label and landmarks if these are known.

    All methods may be called from several threads.
    """

    image_size: tuple[int, int] = USUAL_SIZE  # height and width, where a model does not say
    find: FindLandmarks | None = None  # finds the landmarks of photographs: a `FaceFinder`

    def __len__(self) -> int:
        raise NotImplementedError

    def name(self, number: int) -> str:
        """Return what a user calls an image: its path, or its key in a dataset."""
        raise NotImplementedError

    def label(self, number: int) -> str:
        """Return whom an image shows; "" if that is unknown."""
        raise NotImplementedError

    def landmarks(self, number: int) -> np.ndarray | None:
        """Return the five landmarks of an image, (5, 2), if they are known."""
        return None

    def decode(self, number: int) -> np.ndarray:
        """Decode an image as it is, (rows, columns, 3) uint8; blue, green, red.

        Raises
        ------
        ImageError
            If it can't be read.
        """
        raise NotImplementedError

    def load(self, number: int, size: tuple[int, int]) -> Face:
        """Load an image as a network takes it, of this size and in RGB."""
        face = face_of(self.decode(number), size, self.landmarks(number), self.find)
        return face._replace(image=face.image[:, :, ::-1])

    def digest(self) -> str:
        """Return a checksum that changes if an image is added, moved or replaced."""
        raise NotImplementedError


class _Files(Images):
    """Image files, named by their paths."""

    def __init__(self, sources: Sequence[Source]):
        self._sources = sources

    def __len__(self) -> int:
        return len(self._sources)

    def name(self, number: int) -> str:
        return self._sources[number].path

    def label(self, number: int) -> str:
        return str(self._sources[number].identity)

    def landmarks(self, number: int) -> np.ndarray | None:
        return self._sources[number].landmarks

    def decode(self, number: int) -> np.ndarray:
        try:
            return decode(np.fromfile(self._sources[number].path, np.uint8))
        except OSError as error:
            raise ImageError(error.strerror) from None

    def digest(self) -> str:
        digest = hashlib.sha256()
        for path, _, landmarks in self._sources:
            digest.update(f"{path}\n{_stamp(path)}\n".encode("utf-8", "surrogateescape"))
            digest.update(b"" if landmarks is None else landmarks.tobytes())
        return digest.hexdigest()


class _Records(Images):
    """The images of a dataset, named by their keys."""

    def __init__(self, records: Records):
        self._records = records
        self.image_size = records.image_size

    def __len__(self) -> int:
        return len(self._records)

    def name(self, number: int) -> str:
        return str(self._records.keys[number])

    def label(self, number: int) -> str:
        return str(self._records.labels[number])

    def decode(self, number: int) -> np.ndarray:
        try:
            return decode(self._records.read(number)[1])
        except RecordError as error:
            raise ImageError(str(error)) from None

    def digest(self) -> str:
        described = _stamp(self._records.path).encode() + self._records.offsets.tobytes()
        return hashlib.sha256(described).hexdigest()


class _Pack(Images):
    """The images of a verification pack, named by their numbers: pair p has 2 p and 2 p + 1."""

    def __init__(self, pack: Pack):
        self._pack = pack
        with contextlib.suppress(ImageError):  # a broken image is counted later
            self.image_size = decode(pack.images[0]).shape[:2]

    def __len__(self) -> int:
        return len(self._pack.images)

    def name(self, number: int) -> str:
        return str(number)

    def label(self, number: int) -> str:
        return "" if self._pack.people is None else str(self._pack.people.flat[number])

    def decode(self, number: int) -> np.ndarray:
        return decode(self._pack.images[number])

    def digest(self) -> str:
        digest = hashlib.sha256()
        for image in self._pack.images:
            digest.update(len(image).to_bytes(8, "little") + image.tobytes())
        return digest.hexdigest()


def image_files(sources: Sequence[Source], find: FindLandmarks | None = None) -> Images:
    """Take image files, in this order; `find` finds the landmarks of photographs."""
    images = _Files(sources)
    images.find = find
    return images


def dataset_images(records: Records) -> Images:
    """Take the images of a dataset, in its order."""
    return _Records(records)


def open_images(
    inputs: str | Sequence[str], folder: str | None = None, find: FindLandmarks | None = None
) -> Images:
    """Open what a user names.

    Parameters
    ----------
    inputs : str, or sequence of str
        One or more image files, or one of these: a folder of images, with or without one folder per
        person; a list of images, see `folders`; a dataset, its folder or its ``.rec``; a ``.bin``.
    folder : str, optional
        Paths in a list are relative to it; by default to the folder of the list.
    find : callable, optional
        Finds the landmarks of photographs that come without: a `FaceFinder`.

    Examples
    --------
    >>> images = open_images("people")  # doctest: +SKIP
    >>> images.name(0), images.label(0)  # doctest: +SKIP
    ('people/ann/1.jpg', 'ann')
    """
    paths = [inputs] if isinstance(inputs, str) else list(inputs)
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        raise FileNotFoundError(f"{missing[0]}: there is no such file or folder")
    if paths and all(_is_image(path) for path in paths):
        return image_files([Source(path, "") for path in paths], find)
    if len(paths) != 1:
        raise ValueError(
            f"{' '.join(paths)}: several image files, or one folder, list, .rec or .bin"
        )
    images = _open_one(paths[0], folder)
    images.find = find
    return images


def _open_one(path: str, folder: str | None) -> Images:
    extension = os.path.splitext(path)[1].lower()
    if os.path.exists(os.path.join(path, "train.rec")):
        return dataset_images(Records(path))
    if extension == ".rec":
        return dataset_images(Records(find_rec(path)))
    if extension == ".bin":
        return _Pack(read_pack(path))
    if os.path.isdir(path) or extension in LISTS:
        return image_files(open_sources(path, folder, labelled=False))
    raise ValueError(
        f"{path}: it is neither a folder, an image ({', '.join(EXTENSIONS)}), a list "
        f"({', '.join(LISTS)}), a .rec nor a .bin"
    )


def open_sources(path: str, folder: str | None = None, labelled: bool = True) -> list[Source]:
    """List the image files of a folder or a list.

    Parameters
    ----------
    path, folder
        See `open_images`.
    labelled : bool
        Whether it must be known of every image whom it shows.
    """
    if os.path.isdir(path):
        return scan_folder(path, labelled).sources
    return read_list(path, os.path.dirname(path) if folder is None else folder, labelled)


def _is_image(path: str) -> bool:
    return path.lower().endswith(EXTENSIONS) and os.path.isfile(path)


def _stamp(path: str) -> str:
    """Return the size and the time of a file; "" if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"
