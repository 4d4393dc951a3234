"""Measure whole training steps of a network, against the same network in ``mx.mod.Module``.

    python tools/bench_train.py --network y1 --batch-size 16
    python tools/bench_train.py --network tiny --image-size 56 --batch-size 128

A step is forward, cosine softmax over some classes, backward and update, on images that are in
memory already. `Module` is how insightface's own scripts train; both run in turns, medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any, Callable

import numpy as np

from dsoftmax.recognition.common.cli import add_json_flag, command, image_size, print_json
from dsoftmax.recognition.common.preflight import check_mxnet
from dsoftmax.tools.benchmarks.measuring import describe_machine

check_mxnet()

import mxnet as mx  # noqa: E402
from mxnet import autograd, nd  # noqa: E402

from dsoftmax import losses  # noqa: E402
from dsoftmax.recognition import networks  # noqa: E402
from dsoftmax.recognition.backbone import Backbone  # noqa: E402
from dsoftmax.recognition.common.devices import usable_contexts  # noqa: E402

SCALE = 64.0
SGD = {"learning_rate": 0.01, "momentum": 0.9, "wd": 5e-4}


def our_step(
    network: networks.Network, images: np.ndarray, labels: np.ndarray, classes: int
) -> Callable[[], None]:
    """Return a step as `train.py` does it."""
    context = usable_contexts()[:1]
    network.initialize(networks.initializer(network.name), ctx=context)
    network(nd.array(images[:1], ctx=context[0], dtype="uint8"))
    network.hybridize_for(context[0].device_type)
    backbone = Backbone(network, context, SGD)
    head = losses.create("nsoftmax", classes, network.embedding_size, ctx=context, scale=SCALE)
    head.initialize()
    trainer = head.trainer("sgd", SGD)

    def step() -> None:
        embeddings = backbone.forward(images)
        with autograd.record():
            loss = head(embeddings, labels)
        loss.backward()
        backbone.backward(embeddings.grad)
        backbone.update(SGD["learning_rate"], len(labels))
        trainer.step(len(labels))
        nd.waitall()

    return step


def module_step(
    network: networks.Network, images: np.ndarray, labels: np.ndarray, classes: int
) -> Callable[[], None]:
    """Return a step of the same network and loss as insightface's scripts do it."""
    context = usable_contexts()[0]
    embedding = networks.to_symbol(network)
    weight = mx.sym.var("fc7_weight", shape=(classes, network.embedding_size))
    logits = mx.sym.FullyConnected(
        SCALE * mx.sym.L2Normalization(embedding, mode="instance"),
        mx.sym.L2Normalization(weight, mode="instance"),
        num_hidden=classes,
        no_bias=True,
        name="fc7",
    )
    output = mx.sym.SoftmaxOutput(logits, mx.sym.var("softmax_label"), normalization="valid")
    module = mx.mod.Module(output, context=context, logger=_Silent())
    module.bind([("data", images.shape)], [("softmax_label", labels.shape)])
    module.init_params(networks.initializer(network.name))
    module.init_optimizer(kvstore=None, optimizer="sgd", optimizer_params=tuple(SGD.items()))
    batch = mx.io.DataBatch([nd.array(images)], [nd.array(labels)])

    def step() -> None:
        module.forward(batch, is_train=True)
        module.backward()
        module.update()
        nd.waitall()

    return step


class _Silent:
    """Takes the place of a logger: Module warns of inputs it takes for labels."""

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_: None


def measure(steps: dict[str, Callable[[], None]], warm_ups: int, count: int) -> dict[str, float]:
    """Run steps in turns; return the median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(warm_ups + count):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= warm_ups:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="bench_train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--network", default="tiny", help="as of train.py; %(default)s")
    parser.add_argument("--image-size", type=image_size, default=(112, 112), help="112,112")
    parser.add_argument("--batch-size", type=int, default=64, help="%(default)s")
    parser.add_argument("--classes", type=int, default=1000, help="%(default)s")
    parser.add_argument("--warm-ups", type=int, default=2, help="not counted; %(default)s")
    parser.add_argument("--steps", type=int, default=8, help="counted; %(default)s")
    add_json_flag(parser)
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse_args(argv)
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (args.batch_size, 3, *args.image_size), np.uint8)
    labels = draw.integers(0, args.classes, args.batch_size).astype(np.int32)
    network = networks.create(args.network, image_size=args.image_size)
    medians = measure(
        {
            "ours": our_step(network, images, labels, args.classes),
            "module": module_step(network, images, labels, args.classes),
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
