"""Datasets made of image files, and image files made of datasets.

Images come as one folder per identity, or as a list with one image per line, in one of these forms:

    path label [x1 y1 x2 y2 x3 y3 x4 y4 x5 y5]     separated by tabs, commas or spaces
    aligned path label [box (4)] [x1..x5 y1..y5]   insightface's .lst, separated by tabs
    path box (4) x1 y1 .. x5 y5                    insightface's label.txt; the folder is the label
    index label path                               MXNet's im2rec .lst, separated by tabs
    path,label,x1,y1,..,x5,y5                      a csv with this heading; only path must be there
"""

from __future__ import annotations

import csv
import os
import re
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dsoftmax.recognition.common.cli import some_of
from dsoftmax.recognition.common.files import atomic_folder
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.identities import FILE_NAME, read_names
from dsoftmax.recognition.data.images import (
    FEW,
    JPEG_QUALITY,
    FindLandmarks,
    ImageError,
    NoFaceError,
    decode,
    encode,
    face_of,
    fitted_note,
)
from dsoftmax.recognition.data.records import Records, RecordWriter

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
COORDINATES = [f"{axis}{point}" for point in range(1, 6) for axis in "xy"]
COLUMNS = ["path", "label", *COORDINATES]  # of a csv


LABEL_TXT = 15  # columns of insightface's list of landmarks
LABEL_TXT_LAYOUT = ("label.txt", "images")  # where its dir2rec.py looks for list and images


class Source(NamedTuple):
    """An image file and whom it shows."""

    path: str
    identity: str | int  # "" if it is unknown
    landmarks: np.ndarray | None = None  # (5, 2) as (x, y)


class Scan(NamedTuple):
    """What lies in a folder that has one folder per identity, by path."""

    sources: list[Source]
    hidden: list[str]  # files and folders whose names begin with a dot
    others: list[str]  # files that are no images, or in nobody's folder


@dataclass
class Summary:
    """Counts what `build` wrote and lists what it left out."""

    images: int = 0
    identities: int = 0
    aligned: int = 0  # by their landmarks
    fitted: list[str] = field(default_factory=list)  # "path (rows x columns)" of another size
    unreadable: list[str] = field(default_factory=list)  # "path: why"
    faceless: list[str] = field(default_factory=list)  # "path: why", no face was found in them
    too_small_identities: int = 0
    new_identities: int = 0  # the others have the labels of an earlier dataset


def natural_key(text: str) -> tuple:
    """Return a sort key that puts ``image2`` before ``image10``."""
    parts = re.split(r"(\d+)", text)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts], text


def find_sources(folder: str, path: str | None = None) -> Scan:
    """Find the images of a dataset.

    Parameters
    ----------
    folder : str
    path : str, optional
        A list of images in `folder`. Without it, a folder as insightface's ``dir2rec.py`` takes it,
        with ``label.txt`` and ``images``, has that list, and any other one folder per identity.
    """
    if path is None:
        label_txt, images = (os.path.join(folder, name) for name in LABEL_TXT_LAYOUT)
        if not (os.path.isfile(label_txt) and os.path.isdir(images)):
            return scan_folder(folder)
        path, folder = label_txt, images
    return Scan(read_list(path, folder), [], [])


def scan_folder(folder: str, labelled: bool = True) -> Scan:
    """Find ``<folder>/<identity>/<image>``, including images in folders below the identity's.

    Parameters
    ----------
    folder : str
    labelled : bool
        Whether every image must have an identity; otherwise ``<folder>/<image>`` counts, too, and
        comes first.
    """
    scan = Scan([], [], [])
    for name, path in sorted((entry.name, entry.path) for entry in os.scandir(folder)):
        if name.startswith("."):
            scan.hidden.append(path)
        elif os.path.isdir(path):
            _scan_identity(name, path, scan)
        else:
            scan.others.append(path)
    if not labelled:
        scan = _take_unlabelled(scan)
    if not scan.sources:
        others = f"\n{some_of(scan.others, FEW)}" if scan.others else ""
        wanted = f"{', '.join(EXTENSIONS)} files"
        if labelled:
            wanted = f"one folder per identity with {wanted}, or give a list"
        raise ValueError(f"{folder}: no images in it; it must hold {wanted}{others}")
    return scan


def _take_unlabelled(scan: Scan) -> Scan:
    images = [path for path in scan.others if path.lower().endswith(EXTENSIONS)]
    unlabelled = [Source(path, "") for path in sorted(images, key=natural_key)]
    others = [path for path in scan.others if path not in set(images)]
    return Scan(unlabelled + scan.sources, scan.hidden, others)


def _scan_identity(identity: str, folder: str, scan: Scan) -> None:
    paths = []
    for where, folders, names in os.walk(folder):
        is_hidden = [name for name in folders + names if name.startswith(".")]
        scan.hidden.extend(os.path.join(where, name) for name in is_hidden)
        folders[:] = [name for name in folders if name not in is_hidden]
        paths += [os.path.join(where, name) for name in names if name not in is_hidden]
    for path in sorted(paths, key=natural_key):
        if path.lower().endswith(EXTENSIONS):
            scan.sources.append(Source(path, identity))
        else:
            scan.others.append(path)


def read_list(path: str, folder: str, labelled: bool = True) -> list[Source]:
    """Read a list in any of the forms above.

    Parameters
    ----------
    path : str
    folder : str
        Paths in the list are relative to it.
    labelled : bool
        Whether every line must have a label; otherwise a line may be a path alone.
    """
    sources = []
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = [line.strip("\r\n ") for line in file]
    columns = next(csv.reader(lines[:1]), [])
    parse = _parse_line
    if "path" in columns:

        def parse(line: str) -> Source:
            return parse_row(dict(zip(columns, next(csv.reader([line])))))

    for number, line in enumerate(lines, 1):
        if not line or (number == 1 and "path" in columns):
            continue
        try:
            if not labelled and os.path.exists(os.path.join(folder, line)):
                source = Source(line, "")
            else:
                source = parse(line)
            if labelled and not source.identity:
                raise ValueError("it has no label")
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path}: line {number}: {error}: {line!r}") from None
        sources.append(source._replace(path=os.path.join(folder, source.path)))
    if not sources:
        raise ValueError(f"{path}: the file is empty")
    first = next(filter(None, lines))
    if parse is _parse_line and len(_fields(first)) == LABEL_TXT:
        return sources  # whose labels are names of folders, even where these are digits
    return _number_identities(sources)


def _number_identities(sources: list[Source]) -> list[Source]:
    """Turn labels into numbers if all of them are whole numbers."""
    if all(re.fullmatch(r"\d+(\.0*)?", source.identity) for source in sources):
        return [source._replace(identity=int(float(source.identity))) for source in sources]
    return sources


def _fields(line: str) -> list[str]:
    return line.split("\t") if "\t" in line else re.split(r"\s*,\s*|\s+", line)


def _parse_line(line: str) -> Source:
    fields = _fields(line)
    if "\t" in line and len(fields) == 3 and not _is_number(fields[2]):
        _, label, image = fields
        return Source(image, label)
    if "\t" in line and fields[0] in ("0", "1") and len(fields) in (3, 7, 17):
        aligned, image, label = fields[:3]
        if aligned == "1":
            return Source(image, label)
        if len(fields) != 17:
            raise ValueError("an image that is not aligned needs its five landmarks")
        xs, ys = _numbers(fields[7:12]), _numbers(fields[12:17])
        return Source(image, label, np.column_stack([xs, ys]))
    if len(fields) == 1:
        return Source(line, "")
    if len(fields) == 2:
        return Source(*fields)
    if len(fields) == 12:
        return Source(fields[0], fields[1], _numbers(fields[2:]).reshape(5, 2))
    if len(fields) == LABEL_TXT:
        person, slash, _ = fields[0].partition("/")
        return Source(fields[0], person if slash else "", _numbers(fields[5:]).reshape(5, 2))
    raise ValueError(
        f"{len(fields)} fields; a list has a path, perhaps a label and 10 coordinates, or is "
        "insightface's .lst (3, 7 or 17 columns) or label.txt (15)"
    )


def row_of(source: Source) -> list:
    """Return an image as a row of a csv with the columns `COLUMNS`."""
    points = [""] * 10 if source.landmarks is None else np.ravel(source.landmarks).tolist()
    return [source.path, source.identity, *points]


def parse_row(row: dict[str, str]) -> Source:
    """Make an image of a row of a csv, by the names of its columns."""
    given = [row.get(column, "").strip() for column in COORDINATES]
    if any(given) and not all(given):
        raise ValueError(f"the landmarks are {', '.join(COORDINATES)}, and one is missing")
    landmarks = _numbers(given).reshape(5, 2) if all(given) else None
    return Source(row["path"].strip(), row.get("label", "").strip(), landmarks)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d*)?", text) is not None


def _numbers(fields: list[str]) -> np.ndarray:
    return np.array([float(text) for text in fields])


class Loaded(NamedTuple):
    """An encoded image of the wanted size."""

    encoded: bytes
    fitted_from: tuple[int, int] | None = None  # its size, if it had another and no landmarks
    is_aligned: bool = False  # by its landmarks


def load_image(
    source: Source,
    size: tuple[int, int],
    quality: int = JPEG_QUALITY,
    extension: str = ".jpg",
    find: FindLandmarks | None = None,
) -> Loaded:
    """Read an image file, bring it to `size` (height, width) and encode it.

    A file that has the size and the format already is returned byte for byte. `find` returns the
    landmarks of an image of another size that comes without; see `face_of`.

    Raises
    ------
    ImageError
        If the file can't be read or decoded.
    NoFaceError
        If `find` finds no face.
    """
    try:
        with open(source.path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise ImageError(error.strerror) from None
    image = decode(np.frombuffer(content, np.uint8))
    face = face_of(image, size, source.landmarks, find)
    same_format = content[:4] == b"\x89PNG" if extension == ".png" else content[:2] == b"\xff\xd8"
    if face.image is image and same_format:
        return Loaded(content)
    encoded = encode(face.image, extension, quality)
    return Loaded(encoded, face.fitted_from, face.landmarks is not None)


def build(
    sources: list[Source],
    output: str,
    size: tuple[int, int] = (112, 112),
    quality: int = JPEG_QUALITY,
    extension: str = ".jpg",
    min_images: int = 1,
    threads: int = 2,
    overwrite: bool = False,
    find: FindLandmarks | None = None,
) -> Summary:
    """Write a dataset, grouped by identity; leave out unreadable images and report them.

    Identities that have names are numbered in sorted order, and ``identities.csv`` says whose label
    is which. If `output` has that file already, its labels stay and new people get the next ones.

    Parameters
    ----------
    sources : list of Source
        In any order. Identities are sorted; the images of each keep their order.
    output : str
        Folder for ``train.rec``, ``train.idx``, ``property`` and ``identities.csv``.
    size : (int, int)
        Height and width of the images.
    quality : int
        Of JPEGs.
    extension : {".jpg", ".png"}
        Format of the images in the dataset.
    min_images : int
        Identities with fewer files are left out.
    threads : int
        Decoding threads.
    overwrite : bool
        Replace an existing dataset.
    find : callable, optional
        Returns the landmarks of photographs that come without: a `FaceFinder`.

    Returns
    -------
    Summary
    """
    groups: dict[str | int, list[Source]] = {}
    for source in sources:
        groups.setdefault(source.identity, []).append(source)
    enough = {identity: group for identity, group in groups.items() if len(group) >= min_images}
    summary = Summary(too_small_identities=len(groups) - len(enough))
    if not enough:
        raise ValueError(f"no identity has {min_images} images or more")
    labels: dict[str | int, int] = _labels_by_name(output)
    numbered = isinstance(next(iter(groups)), int)
    if numbered and labels:
        raise ValueError(
            f"{os.path.join(output, FILE_NAME)} names the labels of an earlier dataset, but this "
            "list has labels of its own: remove that file, or choose another --output"
        )
    new = sorted(enough.keys() - labels.keys(), key=None if numbered else natural_key)
    old = sorted(enough.keys() & labels.keys(), key=labels.__getitem__)
    queue = [source for identity in old + new for source in enough[identity]]
    next_label = max(labels.values(), default=-1) + 1

    def load(source: Source) -> Loaded | ImageError:
        try:
            return load_image(source, size, quality, extension, find)
        except ImageError as error:
            return error

    with RecordWriter(output, size, overwrite) as writer:
        loaded = progress(
            map_ordered(load, queue, threads), total=len(queue), desc="packing", unit="images"
        )
        for source, image in zip(queue, loaded):
            if isinstance(image, ImageError):
                left_out = (
                    summary.faceless if isinstance(image, NoFaceError) else summary.unreadable
                )
                left_out.append(f"{source.path}: {image}")
                continue
            if source.identity not in labels:  # only now, so that no label stays without image
                labels[source.identity] = source.identity if numbered else next_label
                next_label += 1
                summary.new_identities += 1
            writer.add(labels[source.identity], image.encoded)
            summary.aligned += image.is_aligned
            if image.fitted_from:
                summary.fitted.append(fitted_note(source.path, image.fitted_from))
        if not writer.num_images:
            left_out = summary.unreadable + summary.faceless
            raise ValueError(f"no image could be used:\n{some_of(left_out)}")
        if not numbered:
            writer.names = {label: name for name, label in labels.items()}
        summary.images, summary.identities = writer.num_images, writer.num_identities
    return summary


def _labels_by_name(folder: str) -> dict[str, int]:
    names = read_names(folder)
    labels = {name: label for label, name in names.items()}
    for label, name in names.items():
        if labels[name] != label:
            raise ValueError(
                f"{os.path.join(folder, FILE_NAME)}: {name!r} has the labels {label} and "
                f"{labels[name]}: mend the file, or remove it to number people anew"
            )
    return labels


def unpack(records: Records, output: str, min_images: int = 1) -> dict[str, int]:
    """Write each image to ``<output>/<label>/<number>.<jpg or png>``.

    Labels and numbers have leading zeros, so that names sort as the dataset does.

    Parameters
    ----------
    records : Records
    output : str
        A folder that does not exist yet, or is empty; it appears when it is complete.
    min_images : int
        Identities with fewer images are left out.

    Returns
    -------
    dict
        The numbers of ``identities`` and ``images`` written.
    """
    counts = np.bincount(records.labels)
    number_of = np.zeros(len(counts), int)
    digits = len(str(len(counts) - 1))
    order = np.argsort(records.labels, kind="stable")
    order = order[counts[records.labels[order]] >= min_images]
    with atomic_folder(output) as folder:
        for image in progress(order, desc="unpacking", unit="images"):
            label, encoded = records.read(int(image))
            identity = os.path.join(folder, f"{label:0{digits}d}")
            if number_of[label] == 0:
                os.mkdir(identity)
            extension = "png" if encoded[:4].tobytes() == b"\x89PNG" else "jpg"
            name = f"{number_of[label]:0{len(str(counts[label] - 1))}d}.{extension}"
            number_of[label] += 1
            with open(os.path.join(identity, name), "wb") as file:
                file.write(encoded)
    return {"identities": int((number_of > 0).sum()), "images": int(number_of.sum())}
