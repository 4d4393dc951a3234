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


class Relabelled(NamedTuple):
    """An identity that has another label in another dataset."""

    old_label: int
    label: int
    images: int = 1  # how many it has, where that is known


def read_label_map(path: str, dataset: str | None = None) -> list[Relabelled]:
    """Read which new label each old one has.

    Parameters
    ----------
    path : str
        A csv file with the columns ``old_label`` and ``label``, such as the ``identities.csv`` of a
        merger. Rows without a label (identities that it has left out) are ignored. ``images`` and
        ``dataset`` may be there.
    dataset : str, optional
        The dataset, as the column ``dataset`` calls it, whose labels are meant; needed if there are
        several.
    """
    rows = read_table(path)
    if not rows or not {"old_label", "label"} <= set(rows[0]):
        raise ValueError(
            f"{path}: it needs the columns old_label and label, and at least one row; identities "
            "of a dataset that was packed anew are found by their names, with --old-dataset"
        )
    names = list(dict.fromkeys(row["dataset"] for row in rows if row.get("dataset")))
    if dataset is None and len(names) > 1:
        raise ValueError(
            f"{path}: it joins {', '.join(names)}: say by --set whose labels are meant"
        )
    if dataset is not None and dataset not in names:
        raise ValueError(f"{path}: --set {dataset}: legal are {', '.join(names) or 'none'}")
    found = []
    for number, row in enumerate(rows, 2):
        if not row["label"] or (names and row["dataset"] != (dataset or names[0])):
            continue
        cells = row["old_label"], row["label"], row.get("images") or "1"
        if not all(cell.isdecimal() for cell in cells):
            raise ValueError(
                f"{path}: line {number}: labels and images are whole numbers, not {cells}"
            )
        found.append(Relabelled(*map(int, cells)))
    return found


def match_names(old_folder: str, folder: str) -> list[Relabelled]:
    """Find the people of one dataset in another one, by the names in ``identities.csv`` of both."""
    old, new = (read_names(one) for one in (old_folder, folder))
    for one, names in ((old_folder, old), (folder, new)):
        if not names:
            raise ValueError(
                f"{one}: it has no {FILE_NAME} with names: say by --map which label became which"
            )
    label_of = {name: label for label, name in new.items()}
    found = [Relabelled(label, label_of[name]) for label, name in old.items() if name in label_of]
    if not found:
        raise ValueError(f"{old_folder} and {folder} have no name in common")
    return found
