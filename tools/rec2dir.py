"""Unpack a dataset into a folder per identity, the images byte for byte as they are stored.

    python tools/rec2dir.py --input faces_emore --output faces_emore_images

`dir2rec` makes the same dataset of such a folder again.
"""

from __future__ import annotations

import argparse
import os
import sys

import numpy as np

from dsoftmax.recognition.common.cli import command
from dsoftmax.recognition.common.files import atomic_folder
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.records import Records


def unpack(records: Records, output: str, min_images: int = 1) -> dict[str, int]:
    """Write each image to ``<output>/<label>/<number>.<jpg or png>``.

    Labels and numbers have leading zeros, so that names sort as the dataset does.

    Parameters
    ----------
    records : Records
    output : str
        A folder that does not exist yet, or is empty; it appears when it is whole.
    min_images : int
        Identities with fewer are left out.

    Returns
    -------
    dict
        The numbers of ``identities`` and ``images`` written.
    """
    counts = np.bincount(records.labels)
    number_of = np.zeros(len(counts), int)
    digits = len(str(len(counts) - 1))
    order = np.argsort(records.labels, kind="stable")
    order = order[counts[records.labels[order]] >= min_images]
    with atomic_folder(output) as folder:
        for image in progress(order, desc="unpacking", unit="images"):
            label, encoded = records.read(int(image))
            identity = os.path.join(folder, f"{label:0{digits}d}")
            if number_of[label] == 0:
                os.mkdir(identity)
            extension = "png" if encoded[:4].tobytes() == b"\x89PNG" else "jpg"
            name = f"{number_of[label]:0{len(str(counts[label] - 1))}d}.{extension}"
            number_of[label] += 1
            with open(os.path.join(identity, name), "wb") as file:
                file.write(encoded)
    return {"identities": int((number_of > 0).sum()), "images": int(number_of.sum())}


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="rec2dir", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", required=True, help="the dataset's folder or .rec file")
    parser.add_argument("--output", required=True, help="a new folder")
    parser.add_argument("--min-images", type=int, default=1, help="leave out smaller identities")
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse_args(argv)
    written = unpack(Records(args.input), args.output, args.min_images)
    print(f"{written['images']} images of {written['identities']} identities in {args.output}")


if __name__ == "__main__":
    sys.exit(main())
