"""Make a dataset (train.rec, train.idx, property, identities.csv) of image files.

The images come as one folder per identity, or as a list:

    python tools/dir2rec.py --input people --output faces            people/<name>/<image>
    python tools/dir2rec.py --input people --list train.lst --output faces
    python tools/dir2rec.py --input photos --detector det_10g.onnx --output faces

A list has one image per line, with paths relative to --input, in one of these forms:

    path label [x1 y1 x2 y2 x3 y3 x4 y4 x5 y5]     separated by tabs, commas or spaces
    aligned path label [box (4)] [x1..x5 y1..y5]   insightface's .lst, separated by tabs
    path box (4) x1 y1 .. x5 y5                    insightface's label.txt; the folder is the label
    index label path                               MXNet's im2rec .lst, separated by tabs
    path,label,x1,y1,..,x5,y5                      a csv with this heading

A folder as insightface's dir2rec.py takes it, with label.txt and a folder images, needs no --list.

Labels that are whole numbers are kept; names are numbered in sorted order, and identities.csv says
whose label is which. If --output has that file already (with --overwrite, or copied there), its
labels stay and new people get the next ones. An image with five landmarks (eyes, nose tip, mouth
corners) is aligned to the ArcFace template; any other is resized to cover the image size and
cropped in the middle, or stored byte for byte if it fits already. With --detector, the landmarks of
images of another size are found; those without a face are left out and listed. Names that begin
with a dot are skipped.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys

from dsoftmax.recognition.common.cli import (
    add_threads_flag,
    command,
    image_size,
    make_parser,
    some_of,
)
from dsoftmax.recognition.data.detection import add_detector_flags, open_finder
from dsoftmax.recognition.data.folders import (
    EXTENSIONS,
    build,
    find_sources,
)
from dsoftmax.recognition.data.images import FEW, JPEG_QUALITY, fitted_warning


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("dir2rec", __doc__)
    files = parser.add_argument_group("files")
    files.add_argument("--input", required=True, help="folder of the images")
    files.add_argument("--list", help="list of images; by default one folder per identity")
    files.add_argument("--output", required=True, help="folder of the dataset")
    files.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    images = parser.add_argument_group("images")
    images.add_argument("--image-size", type=image_size, default="112,112", help="height,width")
    images.add_argument("--quality", type=int, default=JPEG_QUALITY, help="of JPEGs")
    images.add_argument("--encoding", choices=(".jpg", ".png"), default=".jpg", help="format")
    images.add_argument("--min-images", type=int, default=1, help="leave out smaller identities")
    add_detector_flags(parser)
    add_threads_flag(parser)
    return parser


@command(parser=build_parser, needs=["opencv"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    find = open_finder(args.detector, args.face)
    scan = find_sources(args.input, args.list)
    summary = build(
        scan.sources,
        args.output,
        args.image_size,
        args.quality,
        args.encoding,
        args.min_images,
        args.threads,
        args.overwrite,
        find,
    )
    print(
        f"{summary.images} images of {summary.identities} identities in {args.output} "
        f"({summary.aligned} aligned by their landmarks)"
    )
    kept = summary.identities - summary.new_identities
    if kept:
        print(f"{kept} identities kept their labels, {summary.new_identities} are new")
    if scan.hidden:
        print(f"hidden files and folders skipped: {len(scan.hidden)}")
        print(some_of(scan.hidden, FEW))
    if scan.others:
        print(
            f"files skipped, as they are not {', '.join(EXTENSIONS)}, or in nobody's folder: "
            f"{len(scan.others)}"
        )
        print(some_of(scan.others, FEW))
    if summary.too_small_identities:
        print(f"{summary.too_small_identities} identities had fewer than {args.min_images} images")
    if summary.unreadable:
        print(f"{len(summary.unreadable)} images could not be read and were left out:")
        print(some_of(summary.unreadable))
    if summary.faceless:
        print(f"{len(summary.faceless)} photographs were left out, no face was found in them:")
        print(some_of(summary.faceless))
    if summary.fitted:
        advice = "find the faces by --detector, or give five landmarks each by --list"
        print(fitted_warning(summary.fitted, args.image_size, advice))


if __name__ == "__main__":
    sys.exit(main())
