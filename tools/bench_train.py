"""Measure whole training steps of a network, against the same network in ``mx.mod.Module``.

    python tools/bench_train.py --network y1 --batch-size 16
    python tools/bench_train.py --network tiny --image-size 56 --batch-size 128

A step is forward, cosine softmax over some classes, backward and update, on images that are in
memory already. `Module` is what insightface's scripts train with. The two take turns; the figures
are medians.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys
from typing import Any

import numpy as np

from dsoftmax.recognition.common.cli import (
    add_json_flag,
    command,
    image_size,
    make_parser,
    print_json,
)
from dsoftmax.recognition.common.machine import describe_machine


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("bench_train", __doc__)
    parser.add_argument("--network", default="tiny", help="a name that train.py takes")
    parser.add_argument("--image-size", type=image_size, default="112,112", help="height,width")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step")
    parser.add_argument("--classes", type=int, default=1000, help="number of classes")
    parser.add_argument("--warm-ups", type=int, default=2, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=8, help="steps that count")
    add_json_flag(parser)
    return parser


@command(parser=build_parser, needs=["mxnet"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    from dsoftmax.recognition.networks import create
    from dsoftmax.tools.benchmarks import train_step

    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (args.batch_size, 3, *args.image_size), np.uint8)
    labels = draw.integers(0, args.classes, args.batch_size).astype(np.int32)
    network = create(args.network, image_size=args.image_size)
    medians = train_step.measure(
        {
            "ours": train_step.OurStep(network, images, labels, args.classes),
            "module": train_step.ModuleStep(network, images, labels, args.classes),
        },
        args.warm_ups,
        args.steps,
    )
    rates = {name: args.batch_size / seconds for name, seconds in medians.items()}
    report: dict[str, Any] = {
        "machine": describe_machine(),
        "network": args.network,
        "image_size": list(args.image_size),
        "batch_size": args.batch_size,
        "images_per_second": rates,
    }
    if args.json:
        print_json(report, args.json)
    if args.json != "-":
        height, width = args.image_size
        print("{processor}, {cores} cores, {memory_gb} GB".format(**report["machine"]))
        print(
            f"{args.network} on {height}x{width}, batches of {args.batch_size}: "
            f"{rates['ours']:.1f} images/s, mx.mod.Module {rates['module']:.1f}, ours "
            f"{rates['ours'] / rates['module']:.2f} x as fast"
        )


if __name__ == "__main__":
    sys.exit(main())
