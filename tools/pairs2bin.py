"""Make a verification pack (.bin) of image files and a list of pairs.

    python tools/pairs2bin.py --data-dir lfw --pairs pairs.txt --output lfw.bin
    python tools/pairs2bin.py --data-dir people --output people.bin

The list of pairs is --pairs, or one that LFW, AgeDB or insightface's scripts put into --data-dir.
Without a list, pairs are drawn from one folder per person: half of them the same, in random order.
People are drawn first, then their images, so that everyone counts about equally.
A list has one of these forms, recognized by its content:

    Name 1 4            LFW's pairs.txt: images 1 and 4 of one person,
    Name 1 Other 2      image 1 of one and image 2 of another: Name/Name_0001.jpg
    path path 1         insightface's pairs_label.txt: 1 for the same person, 0 for two
    path,path,1         the same as csv, with or without a heading

AgeDB's 04_FINAL_protocol_30_years.mat and CFP's folders Protocol/Split/FP and FF are lists, too,
with the folder of the dataset as --data-dir.

Images are resized to cover the image size and cropped in the middle, or stored byte for byte if
they fit already; with --detector, faces are found and aligned in those of another size. Pairs whose
images can't be read or show no face are left out and listed. Where the people are
known (pairs that were drawn, LFW's list), a .people.csv beside the .bin names them: the intervals
of eval/verification.py --calibrate then allow for pairs that share people.
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
from dsoftmax.recognition.data.images import fitted_warning
from dsoftmax.recognition.data.packs import write_pack
from dsoftmax.recognition.data.pairs import (
    LISTS,
    describe_people,
    draw_pairs,
    find_list,
    make_pack,
    read_pairs,
)


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("pairs2bin", __doc__)
    files = parser.add_argument_group("files")
    files.add_argument("--data-dir", required=True, help="folder of the images")
    files.add_argument(
        "--pairs",
        help=f"list of pairs; by default {', '.join(LISTS)} of --data-dir, or pairs are drawn",
    )
    files.add_argument("--output", required=True, help="the .bin file")
    images = parser.add_argument_group("images")
    images.add_argument("--image-size", type=image_size, default="112,112", help="height,width")
    add_threads_flag(images)
    add_detector_flags(parser)
    drawing = parser.add_argument_group("without a list of pairs")
    drawing.add_argument("--most", type=int, default=6000, help="number of pairs to draw")
    drawing.add_argument("--seed", type=int, default=0, help="of the random choice")
    return parser


@command(parser=build_parser, needs=["opencv"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    find = open_finder(args.detector, args.face)
    listed = args.pairs or find_list(args.data_dir)
    if listed:
        print(f"pairs of {listed}")
        pairs = read_pairs(listed, args.data_dir)
    else:
        pairs = draw_pairs(args.data_dir, args.most, args.seed)
    made = make_pack(args.output, pairs, args.image_size, args.threads, find)
    write_pack(args.output, made.pack.images, made.pack.issame, made.pack.people)
    print(f"{len(made.pairs)} of {len(pairs)} pairs in {args.output}")
    people = describe_people(made.pairs)
    if people:
        print(people)
    if made.left_out:
        print(f"{len(made.left_out)} pairs were left out, an image of theirs can't be used:")
        print(some_of(made.left_out))
    if made.fitted:
        advice = "find the faces by --detector, or align them first"
        print(fitted_warning(made.fitted, args.image_size, advice))


if __name__ == "__main__":
    sys.exit(main())
