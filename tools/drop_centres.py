r"""Drop all but the main centre of each class, and the images that are far from it.

    python recognition/train.py --loss arcface --loss-option subcentres=3 ...
    python tools/drop_centres.py --model models/r50-arcface-emore/model,0 \
        --classes models/r50-arcface-emore/states/state-00010000/classes.npy \
        --data-dir faces_emore --output faces_emore_clean

With several centres per class, clean images gather at one of them, wrong labels at the others. The
main centre of a class is the one that most of its images are nearest to. The output is a dataset of
the images within --angle degrees of it, to be trained on with one centre; classes.npy, the main
centres, (K, D); and dropped.csv, the images that were left out.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys

from dsoftmax.recognition.common.cli import (
    add_json_flag,
    add_threads_flag,
    command,
    make_parser,
    print_json,
)


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("drop_centres", __doc__)
    parser.add_argument("--model", required=True, help="the trained network: PREFIX,EPOCH")
    parser.add_argument(
        "--classes", required=True, help="classes.npy of a saved state of the same run"
    )
    parser.add_argument("--data-dir", required=True, help="the dataset it was trained on")
    parser.add_argument("--output", required=True, help="folder of the clean dataset")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    parser.add_argument(
        "--angle", type=float, default=75.0, help="degrees beyond which an image is dropped"
    )
    parser.add_argument("--batch-size", type=int, default=64, help="images per batch")
    add_threads_flag(parser)
    add_json_flag(parser)
    return parser


@command(parser=build_parser, needs=["mxnet"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    from dsoftmax.eval.models import load_model
    from dsoftmax.recognition import subcentres
    from dsoftmax.recognition.data.records import Records

    if not 0 < args.angle <= 180:
        raise ValueError(f"--angle must lie in (0, 180] degrees, not {args.angle:g}")
    records = Records(args.data_dir)
    centres = subcentres.read_centres(args.classes, records.num_classes)
    embed = load_model(args.model)
    cosines = subcentres.compare(embed, records, centres, args.batch_size, args.threads)
    choice = subcentres.choose(cosines, records.labels, records.num_classes, args.angle)
    counts = subcentres.write_clean(records, centres, choice, args.output, args.overwrite)
    if args.json:
        print_json(counts, args.json)
    if args.json != "-":
        print(
            f"{counts['images']} images of {counts['identities']} identities kept, "
            f"{counts['dropped']} images and {counts['left_out']} identities left out"
        )


if __name__ == "__main__":
    sys.exit(main())
