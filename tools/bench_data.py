"""Measure how fast training batches are made, against MXNet's iterators.

    python tools/bench_data.py                      on synthetic faces
    python tools/bench_data.py --input faces_emore  on the first images of a dataset

All contenders read the same records in one run, in turns, and deliver shuffled, mirrored batches
as float32 NDArrays: the pipeline; `mx.io.ImageRecordIter`; and a plain Python iterator like
insightface's (`mx.image.imdecode`, one NDArray per image, one prefetch thread). The floor is the
decoder alone, on as many threads. ImageRecordIter never uses more than half the cores minus one, so
the pipeline also runs with that number of threads.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys
import tempfile

import numpy as np

from dsoftmax.recognition.common.cli import (
    add_json_flag,
    add_threads_flag,
    command,
    default_threads,
    make_parser,
    print_json,
)
from dsoftmax.recognition.data.records import Records


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("bench_data", __doc__)
    parser.add_argument("--input", help="a dataset; by default synthetic faces are drawn")
    parser.add_argument("--images", type=int, default=6000, help="number of images at most")
    parser.add_argument("--batch-size", type=int, default=128, help="images per batch")
    add_threads_flag(parser)
    parser.add_argument("--rounds", type=int, default=5, help="turns per contender")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn")
    add_json_flag(parser)
    return parser


@command(parser=build_parser, needs=["opencv", "mxnet"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    from dsoftmax.recognition.data.synthetic import make_dataset
    from dsoftmax.tools.benchmarks import batches

    with tempfile.TemporaryDirectory() as folder:
        if args.input:
            source = args.input
        else:
            source = f"{folder}/synthetic"
            make_dataset(source, max(args.images // 20, 1), images=20, threads=args.threads)
        records = batches.copy_images(Records(source), f"{folder}/images", args.images)
        if len(records) < 8 * args.batch_size:
            raise ValueError(
                f"{len(records)} images are too few for batches of {args.batch_size}: at least "
                f"eight batches are needed"
            )
        size = np.mean([len(records.read(image)[1]) for image in range(len(records))])
        print(
            f"{len(records)} images of {size / 1024:.1f} KB, {records.image_size[0]}x"
            f"{records.image_size[1]}, batches of {args.batch_size}, {default_threads()} cores",
            file=sys.stderr,
        )
        results = batches.measure(records, args.batch_size, args.threads, args.rounds, args.seconds)
    if args.json:
        print_json(results, args.json)
    else:
        print(batches.table(results))


if __name__ == "__main__":
    sys.exit(main())
