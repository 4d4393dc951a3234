"""Unpack a dataset into one folder per identity, the images byte for byte as they are stored.

    python tools/rec2dir.py --input faces_emore --output faces_emore_images

`dir2rec` makes the same dataset of such a folder again.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys

from dsoftmax.recognition.common.cli import command, make_parser
from dsoftmax.recognition.data.folders import unpack
from dsoftmax.recognition.data.records import Records


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("rec2dir", __doc__)
    parser.add_argument("--input", required=True, help="the dataset's folder or .rec file")
    parser.add_argument("--output", required=True, help="a new folder")
    parser.add_argument("--min-images", type=int, default=1, help="leave out smaller identities")
    return parser


@command(parser=build_parser)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    written = unpack(Records(args.input), args.output, args.min_images)
    print(f"{written['images']} images of {written['identities']} identities in {args.output}")


if __name__ == "__main__":
    sys.exit(main())
