"""Verification pairs of image files: read from a list, or drawn from one folder per person.

A list has one of these forms, recognized by its content:

    Name 1 4            LFW's pairs.txt: images 1 and 4 of one person,
    Name 1 Other 2      image 1 of one and image 2 of another: Name/Name_0001.jpg
    path path 1         insightface's pairs_label.txt: 1 for the same person, 0 for two
    path,path,1         the same as csv, with or without a heading
"""

from __future__ import annotations

import csv
import os
import random
from itertools import combinations
from typing import NamedTuple

import numpy as np

from dsoftmax.recognition.common.cli import some_of
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.folders import EXTENSIONS, Source, load_image, scan_folder
from dsoftmax.recognition.data.images import ImageError
from dsoftmax.recognition.data.packs import Pack

TRUTH = {"1": True, "0": False, "true": True, "false": False, "same": True, "different": False}


class Pair(NamedTuple):
    """Two image files and whether they show one person."""

    first: str
    second: str
    issame: bool


def read_pairs(path: str, folder: str) -> list[Pair]:
    """Read a list of pairs in any of the forms above, with paths relative to `folder`."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        lines = [line.rstrip("\r\n") for line in file]
    delimiter = next((mark for mark in ("\t", ",") if any(mark in line for line in lines)), None)
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        fields = next(csv.reader([line], delimiter=delimiter)) if delimiter else line.split()
        fields = [text.strip() for text in fields]
        try:
            pairs.append(_parse_pair(fields, folder))
        except ValueError:
            if number == 1 and _is_heading(fields, folder):
                continue
            raise ValueError(
                f"{path}: line {number} is none of `Name 1 4`, `Name 1 Other 2`, `path path 1` and "
                f"`path,path,1`: {line!r}"
            ) from None
    if not pairs:
        raise ValueError(f"{path}: the file holds no pair")
    return pairs


def _is_heading(fields: list[str], folder: str) -> bool:
    """Distinguish a csv's heading, or LFW's numbers of folds and pairs, from a malformed pair."""
    is_file = (os.path.exists(os.path.join(folder, text)) for text in fields)
    return all(text.isdigit() for text in fields) or (len(fields) == 3 and not any(is_file))


def _parse_pair(fields: list[str], folder: str) -> Pair:
    if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit():
        name, first, second = fields
        return Pair(_lfw_image(folder, name, first), _lfw_image(folder, name, second), True)
    if len(fields) == 4 and fields[1].isdigit() and fields[3].isdigit():
        one, first, other, second = fields
        return Pair(_lfw_image(folder, one, first), _lfw_image(folder, other, second), False)
    if len(fields) == 3 and fields[2].lower() in TRUTH:
        first, second = (os.path.join(folder, path) for path in fields[:2])
        return Pair(first, second, TRUTH[fields[2].lower()])
    raise ValueError


def _lfw_image(folder: str, name: str, number: str) -> str:
    stem = os.path.join(folder, name, f"{name}_{int(number):04d}")
    for extension in EXTENSIONS:
        if os.path.exists(stem + extension):
            return stem + extension
    return f"{stem}.jpg"


def draw_pairs(folder: str, most: int = 6000, seed: int = 0) -> list[Pair]:
    """Draw pairs from one folder per person, half of them of the same person, in random order.

    Parameters
    ----------
    folder : str
        Holds one folder of images per person.
    most : int
        The number of pairs; fewer where there are not as many different ones.
    seed : int
    """
    people: dict[str, list[str]] = {}
    for source in scan_folder(folder):
        people.setdefault(str(source.identity), []).append(source.path)
    draw = random.Random(seed)
    same = [pair for images in people.values() for pair in combinations(images, 2)]
    if not same or len(people) < 2:
        raise ValueError(
            f"{folder}: {len(people)} people, {len(same)} pairs of one person: drawing pairs "
            "takes at least two people, one of them with two images"
        )
    images = [(person, path) for person, paths in people.items() for path in paths]
    different: set[tuple[str, str]] = set()
    half = min(most // 2, len(same))
    for _ in range(100 * half):  # enough even if nearly all images are of one person
        if len(different) == half:
            break
        (one, first), (other, second) = sorted(draw.sample(images, 2))
        if one != other:
            different.add((first, second))
    same = draw.sample(same, len(different))
    pairs = [Pair(*paths, True) for paths in same]
    pairs += [Pair(*paths, False) for paths in sorted(different)]
    draw.shuffle(pairs)
    return pairs


def make_pack(
    name: str, pairs: list[Pair], size: tuple[int, int] = (112, 112), threads: int = 2
) -> tuple[Pack, list[str]]:
    """Load all pairs that can be read into a pack.

    Parameters
    ----------
    name : str
        The pack's.
    pairs : list of Pair
    size : (int, int)
        Height and width of the images.
    threads : int
        Decoding threads.

    Returns
    -------
    pack : Pack
    left_out : list of str
        The files that could not be read, and why.
    """

    def load(pair: Pair) -> tuple[bytes, bytes] | str:
        images = []
        for path in (pair.first, pair.second):
            try:
                images.append(load_image(Source(path, ""), size))
            except ImageError as error:
                return f"{path}: {error}"
        return images[0], images[1]

    images, issame, paths, left_out = [], [], [], []
    loaded = progress(
        map_ordered(load, pairs, threads), total=len(pairs), desc="loading", unit="pairs"
    )
    for pair, result in zip(pairs, loaded):
        if isinstance(result, str):
            left_out.append(result)
        else:
            images += [np.frombuffer(image, np.uint8) for image in result]
            issame.append(pair.issame)
            paths += [pair.first, pair.second]
    if not issame:
        raise ValueError(f"no pair could be read:\n{some_of(left_out)}")
    return Pack(name, images, np.array(issame), paths), left_out
