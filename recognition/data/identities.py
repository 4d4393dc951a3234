"""Whom the labels of a dataset stand for: ``identities.csv``, beside its ``.rec``."""

from __future__ import annotations

import csv
import io
import os
from typing import Iterable, NamedTuple, Sequence

from dsoftmax.recognition.common.files import AtomicFile

FILE_NAME = "identities.csv"


class Named(NamedTuple):
    """A class of a dataset."""

    label: int
    name: str
    images: int


def write_table(path: str, heading: Sequence[str], rows: Iterable[Sequence]) -> None:
    """Write a csv file. Names of files that are not UTF-8 keep their bytes."""
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(heading)
    table.writerows(rows)
    with AtomicFile(path) as file:
        file.write(text.getvalue().encode("utf-8", "surrogateescape"))


def read_table(path: str) -> list[dict[str, str]]:
    """Read what `write_table` has written, or a spreadsheet has saved as csv in UTF-8."""
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


def write_identities(path: str, identities: Iterable[Named]) -> None:
    """Write label, name and number of images of each class."""
    write_table(path, Named._fields, identities)


def read_names(folder: str) -> dict[int, str]:
    """Read the names of a dataset's labels; none where no file has them.

    Parameters
    ----------
    folder : str
        The dataset's. Its ``identities.csv`` has the columns ``label`` and ``name``; rows without a
        label (identities that a merge has left out) and other columns are ignored.
    """
    path = os.path.join(folder, FILE_NAME)
    if not os.path.exists(path):
        return {}
    names: dict[int, str] = {}
    for number, row in enumerate(read_table(path), 2):
        label, name = (row.get(key) or "" for key in ("label", "name"))
        if not (label and name):
            continue
        if not label.isdecimal() or int(label) in names:
            raise ValueError(
                f"{path}: line {number}: the label of {name!r} must be a whole number that nobody "
                f"else has, not {label!r}; mend the file, or remove it to number people anew"
            )
        names[int(label)] = name
    return names
