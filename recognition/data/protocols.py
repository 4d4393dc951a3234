"""The lists of pairs that come with AgeDB and CFP, in the form in which those are distributed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import NamedTuple

from dsoftmax.recognition.common.files import open_text

AGEDB_IMAGES = "03_Protocol_Images"
SECONDS_TO_READ = 60
CFP_KINDS = {"FF": ("F", "F"), "FP": ("F", "P")}  # which lists the two images of a pair are in


class ListedPair(NamedTuple):
    """Two image files of a protocol, and whom they show."""

    first: str
    second: str
    people: tuple[str, str]


def read_agedb(path: str, folder: str) -> list[ListedPair]:
    """Read AgeDB's ``04_FINAL_protocol_30_years.mat``.

    Parameters
    ----------
    path : str
        A cell array `splits`, one per fold, of pairs of (name, age).
    folder : str
        Holds ``03_Protocol_Images/<name>.jpg``; names begin with the person, up to an underscore.

    Returns
    -------
    list of ListedPair
        Fold after fold.
    """
    images = os.path.join(folder, AGEDB_IMAGES)
    return [
        ListedPair(
            *(os.path.join(images, f"{name}.jpg") for name in pair),
            people=tuple(name.split("_")[0] for name in pair),
        )
        for pair in _read_agedb_names(path)
    ]


def _read_agedb_names(path: str) -> list[list[str]]:
    """Read the names of the images of each pair, in a process: damaged files make SciPy crash."""
    with open(path, "rb"):
        pass  # or say why not
    command = [sys.executable, "-m", __name__, os.fspath(path)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS_TO_READ, check=False
        )
        reason = (done.stderr.strip().splitlines() or ["SciPy can't read it"])[-1]
        if done.returncode == 0:
            return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        reason = f"it took more than {SECONDS_TO_READ} s"
    raise ValueError(f"{path}: not AgeDB's list of pairs, a .mat with `splits` ({reason})")


def _parse_agedb(path: str) -> list[list[str]]:
    from scipy.io import loadmat

    return [
        [str(split[row][column][0][0][0][0]) for row in (0, 1)]
        for split in (fold[0][0][0][0] for fold in loadmat(path)["splits"])
        for column in range(split.shape[1])
    ]


def read_cfp(path: str, folder: str) -> list[ListedPair]:
    """Read CFP's ``Protocol/Split/FP`` or ``Protocol/Split/FF``.

    Parameters
    ----------
    path : str
        A folder ``01`` … ``10`` per fold, each with ``same.txt`` and ``diff.txt`` of lines ``i,j``.
    folder : str
        Of CFP: ``Protocol/Pair_list_F.txt`` and ``Protocol/Pair_list_P.txt`` say which image i is,
        with paths relative to ``Protocol``.

    Returns
    -------
    list of ListedPair
        Fold after fold.
    """
    kind = os.path.basename(os.path.normpath(path))
    if kind not in CFP_KINDS:
        raise ValueError(
            f"{path}: a folder of pairs is CFP's Protocol/Split/FP or Protocol/Split/FF"
        )
    images = [_read_cfp_images(folder, letter) for letter in CFP_KINDS[kind]]
    pairs = []
    for fold in sorted(entry for entry in os.listdir(path) if entry.isdecimal()):
        for name in ("same.txt", "diff.txt"):
            pairs += _read_cfp_pairs(os.path.join(path, fold, name), images)
    if not pairs:
        raise ValueError(f"{path}: there is no folder 01, 02, … with pairs in it")
    return pairs


def _read_cfp_images(folder: str, letter: str) -> dict[int, str]:
    """Return the paths of ``Pair_list_F.txt`` or ``Pair_list_P.txt`` by their numbers."""
    protocol = os.path.join(folder, "Protocol")
    path = os.path.join(protocol, f"Pair_list_{letter}.txt")
    images = {}
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            fields = line.split()
            if len(fields) != 2 or not fields[0].isdecimal():
                raise ValueError(f"{path}: line {number} must be `number path`: {line.rstrip()!r}")
            images[int(fields[0])] = os.path.normpath(os.path.join(protocol, fields[1]))
    return images


def _read_cfp_pairs(path: str, images: list[dict[int, str]]) -> list[ListedPair]:
    pairs = []
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            match = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", line)
            found = [of.get(int(text)) for of, text in zip(images, match.groups())] if match else []
            if not found or None in found:
                raise ValueError(
                    f"{path}: line {number} must be `i,j`, two numbers of CFP's lists of images: "
                    f"{line.rstrip()!r}"
                )
            pairs.append(ListedPair(*found, people=tuple(map(_cfp_person, found))))
    return pairs


def _cfp_person(path: str) -> str:
    """Return 001 of ``Data/Images/001/frontal/01.jpg``."""
    return os.path.basename(os.path.dirname(os.path.dirname(path)))


if __name__ == "__main__":
    print(json.dumps(_parse_agedb(sys.argv[1])))
