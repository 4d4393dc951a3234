"""Make a verification pack (.bin) of image files and a list of pairs.

    python tools/pairs2bin.py --data-dir lfw --pairs pairs.txt --output lfw.bin
    python tools/pairs2bin.py --data-dir people --output people.bin

Without a list, pairs are drawn from a folder per person: half of them the same, in random order.
The list is one of these, told apart by what is in it:

    Name 1 4            LFW's pairs.txt: images 1 and 4 of one person,
    Name 1 Other 2      image 1 of one and image 2 of another: Name/Name_0001.jpg
    path path 1         insightface's pairs_label.txt: 1 for the same person, 0 for two
    path,path,1         the same as csv, with or without a heading

Images are resized to cover the image size and cropped in the middle, or stored byte for byte if
they fit already. A pair whose images can't be read is left out and told.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import sys
from itertools import combinations
from typing import NamedTuple

import numpy as np

from dsoftmax.recognition.common.cli import command, default_threads, image_size, some_of
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.images import ImageError
from dsoftmax.recognition.data.packs import Pack, write_pack
from dsoftmax.tools.dir2rec import EXTENSIONS, Source, load_image, scan_folder

TRUTH = {"1": True, "0": False, "true": True, "false": False, "same": True, "different": False}


class Pair(NamedTuple):
    """Two image files and whether they show one person."""

    first: str
    second: str
    issame: bool


def read_pairs(path: str, folder: str) -> list[Pair]:
    """Read a list of pairs, its images relative to `folder`."""
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
        raise ValueError(f"{path}: there is no pair in it")
    return pairs


def _is_heading(fields: list[str], folder: str) -> bool:
    """Tell a csv's heading, or LFW's numbers of folds and pairs, from a pair with a mistake."""
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
    """Draw pairs from a folder per person, as many of one person as of two, in random order.

    Parameters
    ----------
    folder : str
        Holds a folder of images for each person.
    most : int
        At most so many; fewer where there are not as many different ones.
    seed : int
    """
    people: dict[str, list[str]] = {}
    for source in scan_folder(folder):
        people.setdefault(str(source.identity), []).append(source.path)
    draw = random.Random(seed)
    same = [pair for images in people.values() for pair in combinations(images, 2)]
    if not same or len(people) < 2:
        raise ValueError(
            f"{folder}: {len(people)} people, {len(same)} pairs of one person: to draw pairs takes "
            "two people, one of whom with two images"
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
    """Load all pairs that can be read.

    Returns
    -------
    pack : Pack
    left_out : list of str
        What could not be read, and why.
    """

    def load(pair: Pair) -> tuple[bytes, bytes] | str:
        images = []
        for path in (pair.first, pair.second):
            try:
                images.append(load_image(Source(path, ""), size))
            except ImageError as error:
                return f"{path}: {error}"
        return images[0], images[1]

    images, issame, left_out = [], [], []
    loaded = progress(
        map_ordered(load, pairs, threads), total=len(pairs), desc="loading", unit="pairs"
    )
    for pair, result in zip(pairs, loaded):
        if isinstance(result, str):
            left_out.append(result)
        else:
            images += [np.frombuffer(image, np.uint8) for image in result]
            issame.append(pair.issame)
    if not issame:
        raise ValueError(f"no pair could be read:\n{some_of(left_out)}")
    return Pack(name, images, np.array(issame)), left_out


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="pairs2bin", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", required=True, help="folder the list's images lie in")
    parser.add_argument("--pairs", help="the list; without it, pairs are drawn")
    parser.add_argument("--output", required=True, help="the .bin file")
    parser.add_argument(
        "--image-size", type=image_size, default=(112, 112), help="height,width; 112,112"
    )
    parser.add_argument("--most", type=int, default=6000, help="pairs to draw; %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing; %(default)s")
    parser.add_argument("--threads", type=int, default=default_threads(), help="%(default)s")
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse_args(argv)
    if args.pairs:
        pairs = read_pairs(args.pairs, args.data_dir)
    else:
        pairs = draw_pairs(args.data_dir, args.most, args.seed)
    pack, left_out = make_pack(args.output, pairs, args.image_size, args.threads)
    write_pack(args.output, pack.images, pack.issame)
    print(f"{len(pack)} of {len(pairs)} pairs in {args.output}")
    if left_out:
        print(f"{len(left_out)} pairs were left out, their images can't be read:")
        print(some_of(left_out))


if __name__ == "__main__":
    sys.exit(main())
