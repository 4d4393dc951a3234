"""Verification pairs of image files: read from a list, or drawn from one folder per person.

A list has one of these forms, recognized by its content:

    Name 1 4            LFW's pairs.txt: images 1 and 4 of one person,
    Name 1 Other 2      image 1 of one and image 2 of another: Name/Name_0001.jpg
    path path 1         insightface's pairs_label.txt: 1 for the same person, 0 for two
    path,path,1         the same as csv, with or without a heading

AgeDB's ``.mat`` and CFP's folders of pairs are lists, too.
"""

from __future__ import annotations

import collections
import csv
import logging
import math
import os
import random
from typing import Iterator, NamedTuple, Sequence

import numpy as np

from dsoftmax.recognition.common.cli import some_of
from dsoftmax.recognition.common.files import open_text
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.folders import (
    EXTENSIONS,
    Loaded,
    Source,
    load_image,
    scan_folder,
)
from dsoftmax.recognition.data.images import FindLandmarks, ImageError, fitted_note
from dsoftmax.recognition.data.packs import Pack
from dsoftmax.recognition.data.protocols import read_agedb, read_cfp

# Where insightface's lfw2pack.py, build_eval_pack.py and agedb2pack.py look for their pairs.
LISTS = ("pairs.txt", "pairs_label.txt", "04_FINAL_protocol_30_years.mat")
TRUTH = {"1": True, "0": False, "true": True, "false": False, "same": True, "different": False}


logger = logging.getLogger(__name__)


class Pair(NamedTuple):
    """Two image files and whether they show one person."""

    first: str
    second: str
    issame: bool
    people: tuple[str, str] | None = None  # whom they show, if that is known


class MadePack(NamedTuple):
    """A pack made of image files, and how that went."""

    pack: Pack
    pairs: list[Pair]  # of the pack
    left_out: list[str]  # "path: why", one per pair of which an image can't be used
    fitted: list[str]  # images of another size, as "path (rows x columns)"


def find_list(folder: str) -> str | None:
    """Return the list of pairs that lies beside the images of LFW, AgeDB or insightface's users."""
    paths = (os.path.join(folder, name) for name in LISTS)
    return next(filter(os.path.exists, paths), None)


def read_pairs(path: str, folder: str) -> list[Pair]:
    """Read a list of pairs in any of the forms above, with paths relative to `folder`."""
    if os.path.isdir(path) or os.fspath(path).endswith(".mat"):
        read = read_cfp if os.path.isdir(path) else read_agedb
        return [
            Pair(first, second, people[0] == people[1], people)
            for first, second, people in read(path, folder)
        ]
    with open_text(path, newline="") as file:
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
    return all(text.isdecimal() for text in fields) or (len(fields) == 3 and not any(is_file))


def _parse_pair(fields: list[str], folder: str) -> Pair:
    if len(fields) == 3 and fields[1].isdecimal() and fields[2].isdecimal():
        name, first, second = fields
        images = _lfw_image(folder, name, first), _lfw_image(folder, name, second)
        return Pair(*images, True, (name, name))
    if len(fields) == 4 and fields[1].isdecimal() and fields[3].isdecimal():
        one, first, other, second = fields
        images = _lfw_image(folder, one, first), _lfw_image(folder, other, second)
        return Pair(*images, False, (one, other))
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
    """Draw different pairs from one folder per person, half of them of the same person.

    First people are drawn, then their images, so that a person with many images counts hardly more
    than one with few.

    Parameters
    ----------
    folder : str
        Holds one folder of images per person.
    most : int
        The number of pairs; a warning says so where there are fewer.
    seed : int

    Returns
    -------
    list of Pair
        In random order.
    """
    if most < 2:
        raise ValueError(f"--most must be 2 or more, not {most}")
    images: dict[str, list[str]] = collections.defaultdict(list)
    for source in scan_folder(folder).sources:
        images[str(source.identity)].append(source.path)
    people = list(images)
    counts = [len(images[person]) for person in people]
    num_same = sum(math.comb(count, 2) for count in counts)
    num_different = math.comb(sum(counts), 2) - num_same
    if not (num_same and num_different):
        raise ValueError(
            f"{folder}: {len(people)} people, {num_same} pairs of one person: drawing pairs "
            "takes at least two people, one of them with two images"
        )
    half = min(most // 2, num_same, num_different)
    if half < most // 2:
        logger.warning(
            "%s: %d pairs were asked for, but there are only %d of one person and %d of two: %d "
            "were drawn, as many of each kind",
            *(folder, most, num_same, num_different, 2 * half),
        )
    draw = random.Random(seed)
    pairs = []
    for person, number in _draw_evenly([math.comb(n, 2) for n in counts], half, draw):
        first, second = _unordered(number)
        own = images[people[person]]
        pairs.append(Pair(own[first], own[second], True, (people[person],) * 2))
    # With more pairs of people than are wanted, no two people meet twice.
    numbers = range(math.comb(len(people), 2))
    meetings = [_unordered(n) for n in draw.sample(numbers, min(half, len(numbers)))]
    choices = [counts[one] * counts[other] for one, other in meetings]
    for meeting, number in _draw_evenly(choices, half, draw):
        two = tuple(people[person] for person in meetings[meeting])
        first, second = divmod(number, len(images[two[1]]))
        pairs.append(Pair(images[two[0]][first], images[two[1]][second], False, two))
    draw.shuffle(pairs)
    return pairs


def _draw_evenly(
    sizes: Sequence[int], count: int, draw: random.Random
) -> Iterator[tuple[int, int]]:
    """Draw different members of groups, each group as often as any other while it has members.

    Yields
    ------
    group, member : int
        A member is a number below the group's size.
    """
    shares = [0] * len(sizes)
    groups = [group for group, size in enumerate(sizes) if size]
    while count and groups:
        draw.shuffle(groups)
        for group in groups[:count]:
            shares[group] += 1
        count -= len(groups[:count])
        groups = [group for group in groups if shares[group] < sizes[group]]
    for group, share in enumerate(shares):
        for member in draw.sample(range(sizes[group]), share):
            yield group, member


def _unordered(number: int) -> tuple[int, int]:
    """Count through the pairs a < b: (0, 1), (0, 2), (1, 2), (0, 3) and so on."""
    b = (1 + math.isqrt(1 + 8 * number)) // 2
    return number - b * (b - 1) // 2, b


def describe_people(pairs: Sequence[Pair]) -> str | None:
    """Say who has the largest share of the pairs of one person; None if people are unknown."""
    same = [pair for pair in pairs if pair.issame]
    if not same or any(pair.people is None for pair in pairs):
        return None
    counts = collections.Counter(pair.people[0] for pair in same)
    person, most = counts.most_common(1)[0]
    return (
        f"{len(same)} pairs of one person, of {len(counts)} people; the largest share is "
        f"{person}'s, {most} ({100 * most / len(same):.1f} %)"
    )


def make_pack(
    name: str,
    pairs: list[Pair],
    size: tuple[int, int] = (112, 112),
    threads: int = 2,
    find: FindLandmarks | None = None,
) -> MadePack:
    """Load all pairs that can be read into a pack; an image of several pairs is loaded once.

    Parameters
    ----------
    name : str
        The pack's.
    pairs : list of Pair
    size : (int, int)
        Height and width of the images.
    threads : int
        Decoding threads.
    find : callable, optional
        Returns the landmarks of photographs: a `FaceFinder`.

    Returns
    -------
    MadePack
    """

    def load(path: str) -> Loaded | ImageError:
        try:
            return load_image(Source(path, ""), size, find=find)
        except ImageError as error:
            return error

    paths = list(dict.fromkeys(path for pair in pairs for path in pair[:2]))
    loaded = progress(
        map_ordered(load, paths, threads), total=len(paths), desc="loading", unit="images"
    )
    results = dict(zip(paths, loaded))
    errors = {path: error for path, error in results.items() if isinstance(error, ImageError)}
    kept, left_out = [], []
    for pair in pairs:
        bad = next((path for path in pair[:2] if path in errors), None)
        if bad is None:
            kept.append(pair)
        else:
            left_out.append(f"{bad}: {errors[bad]}")
    if not kept:
        raise ValueError(f"no pair could be used:\n{some_of(left_out)}")
    used = [path for pair in kept for path in pair[:2]]
    people = [pair.people for pair in kept]
    pack = Pack(
        name,
        [np.frombuffer(results[path].encoded, np.uint8) for path in used],
        np.array([pair.issame for pair in kept]),
        used,
        None if None in people else np.array(people),
    )
    fitted = [
        fitted_note(path, results[path].fitted_from)
        for path in dict.fromkeys(used)
        if results[path].fitted_from
    ]
    return MadePack(pack, kept, left_out, fitted)
