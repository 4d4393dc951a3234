"""Make a verification pack (.bin) of image files and a list of pairs.

    python tools/pairs2bin.py --data-dir lfw --pairs pairs.txt --output lfw.bin

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
import sys
from typing import NamedTuple

from dsoftmax.recognition.data.images import ImageError
from dsoftmax.recognition.data.packs import write_pack
from dsoftmax.recognition.parallel import map_ordered
from dsoftmax.recognition.progress import progress
from dsoftmax.tools.cli import command, default_threads, image_size, some_of
from dsoftmax.tools.dir2rec import EXTENSIONS, Source, load_image

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


def build_pack(
    pairs: list[Pair], output: str, size: tuple[int, int] = (112, 112), threads: int = 2
) -> list[str]:
    """Write the pack of all pairs that can be read.

    Returns
    -------
    list of str
        What was left out, and why.
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
        map_ordered(load, pairs, threads), total=len(pairs), desc="packing", unit="pairs"
    )
    for pair, result in zip(pairs, loaded):
        if isinstance(result, str):
            left_out.append(result)
        else:
            images.extend(result)
            issame.append(pair.issame)
    if not issame:
        raise ValueError(f"no pair could be read:\n{some_of(left_out)}")
    write_pack(output, images, issame)
    return left_out


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="pairs2bin", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", required=True, help="folder the list's images lie in")
    parser.add_argument("--pairs", required=True, help="the list")
    parser.add_argument("--output", required=True, help="the .bin file")
    parser.add_argument(
        "--image-size", type=image_size, default=(112, 112), help="height,width; 112,112"
    )
    parser.add_argument("--threads", type=int, default=default_threads(), help="%(default)s")
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse_args(argv)
    pairs = read_pairs(args.pairs, args.data_dir)
    left_out = build_pack(pairs, args.output, args.image_size, args.threads)
    written = len(pairs) - len(left_out)
    print(f"{written} of {len(pairs)} pairs in {args.output}")
    if left_out:
        print(f"{len(left_out)} pairs were left out, their images can't be read:")
        print(some_of(left_out))


if __name__ == "__main__":
    sys.exit(main())
