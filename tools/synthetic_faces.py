"""Draw the embedded dataset: faces of people who never lived, and pairs to verify on.

    python tools/synthetic_faces.py --output faces
    python tools/synthetic_faces.py --output faces --identities 100000 --images 20 --seed 2

Writes train.rec, train.idx and property, val.bin (pairs of people who are not in training) and
sheet.png to look at. Image j of person i depends on the seed alone, not on how many there are.
"""

from __future__ import annotations

import argparse
import sys

from dsoftmax.recognition.common.cli import command, default_threads
from dsoftmax.recognition.data.synthetic import make_dataset


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="synthetic_faces",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", required=True, help="folder of the dataset")
    parser.add_argument("--identities", type=int, default=1000, help="in training; %(default)s")
    parser.add_argument("--images", type=int, default=20, help="of each; %(default)s")
    parser.add_argument("--val-identities", type=int, default=200, help="in pairs; %(default)s")
    parser.add_argument(
        "--pairs",
        type=int,
        default=1200,
        help="in val.bin, a multiple of 20, half of them of one person; %(default)s",
    )
    parser.add_argument("--seed", type=int, default=1, help="%(default)s")
    parser.add_argument("--size", type=int, default=112, help="height and width; %(default)s")
    parser.add_argument(
        "--threads", type=int, default=default_threads(), help="processes that draw; %(default)s"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset that is there")
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse_args(argv)
    summary = make_dataset(**vars(args))
    print(
        f"{summary['images']} images of {summary['identities']} identities and {summary['pairs']} "
        f"pairs of {summary['val_identities']} others in {args.output}"
    )
    print(
        f"{summary['drawn']} images drawn in {summary['seconds']:.1f} s "
        f"({summary['drawn'] / summary['seconds']:.0f} images/s)"
    )
    print(f"Look at {args.output}/sheet.png: each row is one person.")


if __name__ == "__main__":
    sys.exit(main())
