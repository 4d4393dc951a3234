r"""Join datasets into one, and leave out the identities they share.

    python tools/rec_merge.py --include faces_emore,megaface2 --output joint
    python tools/rec_merge.py --include faces_emore,megaface2 --output joint \
        --model models/y1/model,0
    python tools/rec_merge.py --include faces_emore,megaface2 --output joint \
        --embeddings emore.npy,megaface2.npy --exclude lfw.npy

Identities are numbered anew, 0, 1, ..., one dataset after the other. With --model, which embeds all
images and keeps the embeddings in <output>/embeddings, or with --embeddings (one row per image, in
the order of the dataset), an identity whose centre is near one of an *earlier* dataset is
considered the same person and left out, and so is one near a row of --exclude (embeddings of test
images, or centres). identities.csv, beside the result, lists all identities with their new labels
and their names if these are known, or why they were left out.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import os
import sys

import numpy as np

from dsoftmax.recognition.common.cli import add_threads_flag, command, cosine, make_parser
from dsoftmax.recognition.data.merging import load_embeddings, merge, select_identities
from dsoftmax.recognition.data.records import Records


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("rec_merge", __doc__)
    files = parser.add_argument_group("files")
    files.add_argument("--include", required=True, help="the datasets, separated by commas")
    files.add_argument("--output", required=True, help="folder of the result")
    files.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    files.add_argument(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="write only images, in random order, as MXNet's ImageRecordIter reads them",
    )
    overlap = parser.add_argument_group("people to leave out")
    overlap.add_argument("--model", help="network that embeds the images: prefix,epoch or .onnx")
    overlap.add_argument("--batch-size", type=int, default=32, help="images at a time")
    add_threads_flag(overlap)
    overlap.add_argument("--embeddings", help="one .npy file per dataset, separated by commas")
    overlap.add_argument("--exclude", help=".npy files of people to leave out, separated by commas")
    overlap.add_argument(
        "--overlap",
        "--param1",
        type=cosine,
        default=0.3,
        help="cosine from which identities of two datasets are one person",
    )
    overlap.add_argument(
        "--exclude-overlap",
        "--param2",
        type=cosine,
        default=0.4,
        help="cosine from which an identity is one of --exclude",
    )
    return parser


@command(parser=build_parser)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    names = args.include.split(",")
    if len(set(names)) < len(names):
        raise ValueError(f"--include: a set is named twice in {args.include!r}")
    datasets = [Records(name) for name in names]
    embeddings, excluded = _embeddings(datasets, args), None
    if args.exclude:
        if embeddings is None:
            raise ValueError("--exclude needs the --embeddings of the sets too, or a --model")
        excluded = np.concatenate([load_embeddings(path) for path in args.exclude.split(",")])
    every = [*(embeddings or []), *([excluded] if excluded is not None else [])]
    if len({array.shape[1] for array in every}) > 1:
        raise ValueError("the embeddings are of different widths")
    identities = select_identities(
        datasets, names, embeddings, excluded, args.overlap, args.exclude_overlap
    )
    done = merge(datasets, names, identities, args.output, args.overwrite, args.shuffle)
    print(
        f"{done['images']} images of {done['identities']} identities in {args.output}; "
        f"{done['left_out']} identities were left out (see identities.csv)"
    )


def _embeddings(datasets: list[Records], args: argparse.Namespace) -> list[np.ndarray] | None:
    """Return the embeddings of each dataset; None if the flags give none."""
    if args.model and args.embeddings:
        raise ValueError("give either --model or --embeddings, not both")
    if args.model:
        from dsoftmax.eval.dataset_embeddings import embed_dataset

        folder = os.path.join(args.output, "embeddings")
        return [
            embed_dataset(records, args.model, folder, args.batch_size, args.threads)
            for records in datasets
        ]
    if not args.embeddings:
        return None
    paths = args.embeddings.split(",")
    if len(paths) != len(datasets):
        raise ValueError(f"--embeddings: {len(paths)} files for {len(datasets)} sets")
    return [load_embeddings(path, len(records)) for path, records in zip(paths, datasets)]


if __name__ == "__main__":
    sys.exit(main())
