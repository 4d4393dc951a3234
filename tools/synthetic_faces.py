"""Draw the embedded dataset: faces of people who never lived, and pairs to verify on.

    python tools/synthetic_faces.py --output faces
    python tools/synthetic_faces.py --output faces --identities 100000 --images 20 --seed 2

Writes train.rec, train.idx and property, val.bin (pairs of people who are not in training) and
sheet.png to look at. Image j of person i depends on the seed alone, not on how many there are.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys

from dsoftmax.recognition.common.cli import add_threads_flag, command, make_parser


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("synthetic_faces", __doc__)
    parser.add_argument("--output", required=True, help="folder of the dataset")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    parser.add_argument("--seed", type=int, default=1, help="of all random choices")
    parser.add_argument("--size", type=int, default=112, help="height and width of the images")
    add_threads_flag(parser, "processes that draw")
    training = parser.add_argument_group("training")
    training.add_argument("--identities", type=int, default=1000, help="number of people")
    training.add_argument("--images", type=int, default=20, help="images per person")
    pairs = parser.add_argument_group("verification")
    pairs.add_argument("--val-identities", type=int, default=200, help="number of other people")
    pairs.add_argument(
        "--pairs",
        type=int,
        default=1200,
        help="pairs in val.bin, a multiple of 20, half of them of one person",
    )
    return parser


@command(parser=build_parser, needs=["opencv"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    from dsoftmax.recognition.data.synthetic import make_dataset

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
