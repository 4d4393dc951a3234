"""Make a dataset (train.rec, train.idx, property) of image files.

The images come as a folder per identity, or as a list:

    python tools/dir2rec.py --input people --output faces            people/<name>/<image>
    python tools/dir2rec.py --input people --list train.lst --output faces

A list has a line an image, its paths relative to --input, in one of these forms:

    path label [x1 y1 x2 y2 x3 y3 x4 y4 x5 y5]     separated by tabs, commas or spaces
    aligned path label [box (4)] [x1..x5 y1..y5]   insightface's .lst, separated by tabs
    index label path                               MXNet's im2rec .lst, separated by tabs

Labels that are whole numbers are kept; names are numbered in sorted order. An image with five
landmarks (eyes, nose tip, mouth corners) is aligned to the ArcFace template; any other is resized
to cover the image size and cropped in the middle, or stored byte for byte if it fits already.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dsoftmax.recognition.common.cli import command, default_threads, image_size, some_of
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.images import JPEG_QUALITY, ImageError, align, decode, encode, fit
from dsoftmax.recognition.data.records import RecordWriter

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class Source(NamedTuple):
    """An image to take in."""

    path: str
    identity: str | int
    landmarks: np.ndarray | None = None  # (5, 2) as (x, y)


@dataclass
class Summary:
    """What became of the images."""

    images: int = 0
    identities: int = 0
    aligned: int = 0
    unreadable: list[str] = field(default_factory=list)
    too_small_identities: int = 0


def natural_key(text: str) -> list:
    """Sort key that puts ``image2`` before ``image10``."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", text)]


def scan_folder(folder: str) -> list[Source]:
    """Find ``<folder>/<identity>/<image>``; images deeper inside count to the identity too."""
    sources = []
    for entry in sorted((e for e in os.scandir(folder) if e.is_dir()), key=_entry_key):
        paths = [
            os.path.join(where, name)
            for where, _, names in os.walk(entry.path)
            for name in names
            if name.lower().endswith(EXTENSIONS)
        ]
        sources += [Source(path, entry.name) for path in sorted(paths, key=natural_key)]
    if not sources:
        raise ValueError(
            f"{folder}: no images in it; a folder per identity with {', '.join(EXTENSIONS)} files "
            "is looked for, or give a --list"
        )
    return sources


def _entry_key(entry: os.DirEntry) -> list:
    return natural_key(entry.name)


def read_list(path: str, folder: str) -> list[Source]:
    """Read a list file of any of the forms above, its paths relative to `folder`."""
    sources = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            line = line.strip("\r\n ")
            if not line:
                continue
            try:
                source = _parse_line(line)
            except (ValueError, IndexError) as error:
                raise ValueError(f"{path}: line {number}: {error}: {line!r}") from None
            sources.append(source._replace(path=os.path.join(folder, source.path)))
    if not sources:
        raise ValueError(f"{path}: there is no line in it")
    return _keep_numbers(sources)


def _keep_numbers(sources: list[Source]) -> list[Source]:
    if all(re.fullmatch(r"\d+(\.0*)?", source.identity) for source in sources):
        return [source._replace(identity=int(float(source.identity))) for source in sources]
    return sources


def _parse_line(line: str) -> Source:
    fields = line.split("\t") if "\t" in line else re.split(r"\s*,\s*|\s+", line)
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
    if len(fields) == 2:
        return Source(*fields)
    if len(fields) == 12:
        return Source(fields[0], fields[1], _numbers(fields[2:]).reshape(5, 2))
    raise ValueError(f"{len(fields)} fields are none of the forms a list may have")


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d*)?", text) is not None


def _numbers(fields: list[str]) -> np.ndarray:
    return np.array([float(text) for text in fields])


def load_image(
    source: Source, size: tuple[int, int], quality: int = JPEG_QUALITY, extension: str = ".jpg"
) -> bytes:
    """Read an image file, bring it to `size` (height, width) and encode it.

    A file that has the size and the format already is returned byte for byte.

    Raises
    ------
    ImageError
        If the file can't be read or decoded.
    """
    try:
        with open(source.path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise ImageError(error.strerror) from None
    image = decode(np.frombuffer(content, np.uint8))
    if source.landmarks is not None:
        return encode(align(image, source.landmarks, size), extension, quality)
    same_format = content[:4] == b"\x89PNG" if extension == ".png" else content[:2] == b"\xff\xd8"
    if image.shape[:2] == tuple(size) and same_format:
        return content
    return encode(fit(image, *size), extension, quality)


def build(
    sources: list[Source],
    output: str,
    size: tuple[int, int] = (112, 112),
    quality: int = JPEG_QUALITY,
    extension: str = ".jpg",
    min_images: int = 1,
    threads: int = 2,
    overwrite: bool = False,
) -> Summary:
    """Write the dataset, grouped by identity; unreadable images are left out and told.

    Parameters
    ----------
    sources : list of Source
        In any order. Identities are sorted; an identity's images keep theirs.
    output : str
        Folder for ``train.rec``, ``train.idx`` and ``property``.
    size : (int, int)
        Height and width of the images.
    min_images : int
        Identities with fewer files are left out.

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
    numbered = isinstance(next(iter(groups)), int)
    order = sorted(enough, key=None if numbered else natural_key)
    queue = [source for identity in order for source in enough[identity]]

    def load(source: Source) -> bytes | ImageError:
        try:
            return load_image(source, size, quality, extension)
        except ImageError as error:
            return error

    label, current = -1, None
    with RecordWriter(output, size, overwrite) as writer:
        loaded = progress(
            map_ordered(load, queue, threads), total=len(queue), desc="packing", unit="images"
        )
        for source, image in zip(queue, loaded):
            if isinstance(image, ImageError):
                summary.unreadable.append(f"{source.path}: {image}")
                continue
            if source.identity != current:  # numbered here, so that no label stays without image
                current = source.identity
                label = current if numbered else label + 1
            writer.add(label, image)
            summary.aligned += source.landmarks is not None
        if not writer.num_images:
            raise ValueError(f"no image could be read:\n{some_of(summary.unreadable)}")
        summary.images, summary.identities = writer.num_images, writer.num_identities
    return summary


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="dir2rec", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", required=True, help="folder of the images")
    parser.add_argument("--list", help="list file; without it, a folder per identity is looked for")
    parser.add_argument("--output", required=True, help="folder of the dataset")
    parser.add_argument(
        "--image-size", type=image_size, default=(112, 112), help="height,width; 112,112"
    )
    parser.add_argument("--quality", type=int, default=JPEG_QUALITY, help="of JPEGs; %(default)s")
    parser.add_argument("--encoding", choices=(".jpg", ".png"), default=".jpg", help="%(default)s")
    parser.add_argument("--min-images", type=int, default=1, help="leave out smaller identities")
    parser.add_argument("--threads", type=int, default=default_threads(), help="%(default)s")
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset that is there")
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse_args(argv)
    sources = read_list(args.list, args.input) if args.list else scan_folder(args.input)
    summary = build(
        sources,
        args.output,
        args.image_size,
        args.quality,
        args.encoding,
        args.min_images,
        args.threads,
        args.overwrite,
    )
    print(
        f"{summary.images} images of {summary.identities} identities in {args.output} "
        f"({summary.aligned} aligned by their landmarks)"
    )
    if summary.too_small_identities:
        print(f"{summary.too_small_identities} identities had fewer than {args.min_images} images")
    if summary.unreadable:
        print(f"{len(summary.unreadable)} images could not be read and were left out:")
        print(some_of(summary.unreadable))


if __name__ == "__main__":
    sys.exit(main())
