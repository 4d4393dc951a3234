"""From photographs to aligned faces, file by file.

The output has one face per photograph, under the same name in the same folders, and beside them

    faces.csv    what was found in each photograph, or why it has no face
    label.txt    insightface's list of landmarks, which dir2rec --list reads with the photographs
    align.json   how all this was made

A row of faces.csv is written as soon as its face is, so that a run goes on where it was killed.
"""

from __future__ import annotations

import csv
import json
import os
from dataclasses import dataclass, field
from typing import NamedTuple, Sequence

import numpy as np

from dsoftmax.recognition.common.files import AtomicFile, clean_partial
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.detection import FaceFinder
from dsoftmax.recognition.data.folders import COORDINATES, scan_folder
from dsoftmax.recognition.data.identities import read_table, write_table
from dsoftmax.recognition.data.images import ImageError, NoFaceError, align, decode, encode

TABLE, LABELS, SETTINGS = "faces.csv", "label.txt", "align.json"
BOX = ("left", "top", "right", "bottom")
COLUMNS = ("source", "output", "faces", "score", *BOX, *COORDINATES, "reason")


class Photograph(NamedTuple):
    """A row of the table. Paths are relative to the folders of input and output."""

    source: str
    output: str = ""  # the file of the face; "" if there is none
    faces: int = 0  # how many were found
    score: float = 0.0  # of the face that was taken
    box: tuple[float, ...] = ()  # its left, top, right and bottom
    landmarks: tuple[float, ...] = ()  # x1, y1, .. x5, y5
    reason: str = ""  # why there is no face
    is_readable: bool = True  # not in the table: rows without a face are tried again

    def row(self) -> list[str]:
        """Return the cells of the table."""
        if not self.output:
            return [self.source, *[""] * (len(COLUMNS) - 2), self.reason]
        numbers = [f"{number:.3f}" for number in (*self.box, *self.landmarks)]
        return [self.source, self.output, str(self.faces), f"{self.score:.4f}", *numbers, ""]

    @classmethod
    def of_row(cls, row: dict[str, str]) -> Photograph:
        """Read a row that has a face."""
        return cls(
            row["source"],
            row["output"],
            int(row["faces"]),
            float(row["score"]),
            tuple(float(row[column]) for column in BOX),
            tuple(float(row[column]) for column in COORDINATES),
        )


@dataclass
class Summary:
    """Counts what `align_photographs` has done and lists photographs without a face."""

    photographs: int = 0
    aligned: int = 0  # faces that are there now
    done_before: int = 0  # of these, by an earlier run
    several: int = 0  # photographs that show more than one face
    faceless: list[str] = field(default_factory=list)  # "path: why"
    unreadable: list[str] = field(default_factory=list)  # "path: why"
    orphans: list[str] = field(default_factory=list)  # faces whose photographs are gone
    skipped: list[str] = field(default_factory=list)  # files that are no images


def align_photographs(
    source: str,
    output: str,
    finder: FaceFinder,
    size: tuple[int, int] = (112, 112),
    threads: int = 2,
) -> Summary:
    """Find, align and save one face per photograph; go on where an earlier run has stopped.

    Parameters
    ----------
    source : str
        Folder of the photographs, in folders of any depth.
    output : str
        Folder of the faces; must not be in `source`.
    finder : FaceFinder
    size : (int, int)
        Height and width of the faces.
    threads : int
        Photographs at a time.

    Returns
    -------
    Summary
    """
    if os.path.commonpath(map(os.path.realpath, (source, output))) == os.path.realpath(source):
        raise ValueError(f"--output {output} is in --input {source}: choose a folder beside it")
    scan = scan_folder(source, labelled=False)
    paths = [os.path.relpath(found.path, source) for found in scan.sources]
    _check_settings(output, source, finder, size)
    earlier = _read_done(source, output)
    queue = [path for path in paths if path not in earlier]

    def work(path: str) -> Photograph:
        return _align_one(path, source, output, finder, size)

    results = dict(earlier)
    table = os.path.join(output, TABLE)
    write_table(table, COLUMNS, [photograph.row() for photograph in earlier.values()])
    with open(table, "a", encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        worked = progress(
            map_ordered(work, queue, threads), total=len(queue), desc="aligning", unit="photos"
        )
        for photograph in worked:
            results[photograph.source] = photograph
            rows.writerow(photograph.row())
            file.flush()
    photographs = [results.pop(path) for path in paths]
    _write_results(output, photographs)
    return Summary(
        photographs=len(photographs),
        aligned=sum(bool(photograph.output) for photograph in photographs),
        done_before=len(paths) - len(queue),
        several=sum(photograph.faces > 1 for photograph in photographs),
        faceless=_reasons(photographs, is_readable=True),
        unreadable=_reasons(photographs, is_readable=False),
        orphans=[gone.output for gone in results.values()],
        skipped=scan.others,
    )


def _reasons(photographs: Sequence[Photograph], is_readable: bool) -> list[str]:
    return [
        f"{photograph.source}: {photograph.reason}"
        for photograph in photographs
        if photograph.reason and photograph.is_readable == is_readable
    ]


def _check_settings(output: str, source: str, finder: FaceFinder, size: tuple[int, int]) -> None:
    """Refuse a folder that was made with other settings; note them in a new one."""
    settings = {
        "input": os.path.realpath(source),
        **finder.settings(),
        "image_size": list(size),
    }
    path = os.path.join(output, SETTINGS)
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            before = json.load(file)
        other = [name for name, value in settings.items() if before.get(name) != value]
        if other:
            raise ValueError(
                f"{output} was made with another {' and '.join(other)} ({path} says which): choose "
                "another --output, or remove that folder"
            )
    elif os.path.isdir(output) and os.listdir(output):
        raise FileExistsError(f"{output} holds other files; choose another --output")
    else:
        with AtomicFile(path, "w") as file:
            json.dump(settings, file, indent=2)


def _read_done(source: str, output: str) -> dict[str, Photograph]:
    """Return the photographs whose faces are there and not older than they are."""
    for folder, _, _ in os.walk(output):
        clean_partial(folder)
    done = {}
    for photograph in read_faces(output):
        made, taken = (
            _time(os.path.join(*path))
            for path in ((output, photograph.output), (source, photograph.source))
        )
        if made is not None and (taken is None or taken <= made):
            done[photograph.source] = photograph
    return done


def read_faces(output: str) -> list[Photograph]:
    """Read the table of a folder of faces: the photographs that have one."""
    table = os.path.join(output, TABLE)
    rows = read_table(table) if os.path.exists(table) else []
    # The last row may be cut off where a run was killed.
    return [Photograph.of_row(row) for row in rows if row["output"] and None not in row.values()]


def _time(path: str) -> float | None:
    return os.path.getmtime(path) if os.path.exists(path) else None


def _align_one(
    path: str, source: str, output: str, finder: FaceFinder, size: tuple[int, int]
) -> Photograph:
    try:
        image = decode(np.fromfile(os.path.join(source, path), np.uint8))
    except ImageError as error:
        return Photograph(path, reason=str(error), is_readable=False)
    except OSError as error:
        return Photograph(path, reason=error.strerror, is_readable=False)
    try:
        face, count = finder.find(image)
        aligned = align(image, face.landmarks, size)
    except NoFaceError as error:
        return Photograph(path, reason=str(error))
    with AtomicFile(os.path.join(output, path)) as file:
        file.write(encode(aligned, os.path.splitext(path)[1].lower()))
    return Photograph(path, path, count, face.score, tuple(face.box), tuple(face.landmarks.ravel()))


def _write_results(output: str, photographs: Sequence[Photograph]) -> None:
    write_table(os.path.join(output, TABLE), COLUMNS, [one.row() for one in photographs])
    faces = [photograph for photograph in photographs if photograph.output]
    lines = []
    for face in faces:
        numbers = (f"{number:.3f}" for number in (*face.box, *face.landmarks))
        lines.append("\t".join([face.source, *numbers]) + "\n")
    with AtomicFile(os.path.join(output, LABELS)) as file:
        file.write("".join(lines).encode("utf-8", "surrogateescape"))
