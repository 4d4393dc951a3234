"""Measure the evaluation at the size of MegaFace and IJB-C, and the search, on random features.

    python tools/bench_eval.py             3,530 probes, 1,000,000 distractors; 15.6 million pairs
    python tools/bench_eval.py --quick     a hundredth of that
    python tools/bench_eval.py --quick --model models/y1/model,0
    python tools/bench_eval.py --only search

MegaFace: rank all probes among all distractors, against the floor, the bare matrix products by the
fastest way that numpy and MXNet have here, and against a plain loop over probes (measured on a few
of them). IJB-C: from the file of pairs to the rates and the curve, against insightface's way of
scoring pairs 100,000 at a time. Search: the five nearest of 1,000,000 vectors, kept as float32,
float16 and int8, for one query and for several at once, against reading the vectors from memory and
against the bare products; and how many of the nearest are those of float32. --model: images per
second of a network on the CPU, rewritten and as saved. All take turns; figures are medians; memory
is the peak beyond the features.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys
import tempfile
from typing import Any

from dsoftmax.recognition.common.cli import add_json_flag, command, make_parser, print_json
from dsoftmax.recognition.common.machine import describe_machine
from dsoftmax.recognition.common.memory import available_bytes
from dsoftmax.tools.benchmarks import evaluation, search
from dsoftmax.tools.benchmarks.measuring import Isolated

QUICK = {
    "distractors": 20_000,
    "probes": 1_000,
    "pairs": 200_000,
    "templates": 2_000,
    "gallery": 20_000,
}
PARTS = ("megaface", "ijb", "search")


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("bench_eval", __doc__)
    megaface = parser.add_argument_group("MegaFace")
    megaface.add_argument("--probes", type=int, default=3_530, help="number of probes")
    megaface.add_argument("--distractors", type=int, default=1_000_000, help="their number")
    ijb = parser.add_argument_group("IJB-C")
    ijb.add_argument("--pairs", type=int, default=15_600_000, help="number of pairs")
    ijb.add_argument("--templates", type=int, default=23_124, help="number of templates")
    gallery = parser.add_argument_group("search")
    gallery.add_argument("--gallery", type=int, default=1_000_000, help="number of vectors")
    gallery.add_argument("--queries", type=int, default=32, help="asked at once")
    network = parser.add_argument_group("a network")
    network.add_argument("--model", help="prefix,epoch of a network to run on the CPU")
    network.add_argument("--batch-size", type=int, default=32, help="images per batch")
    network.add_argument("--image-size", type=int, default=112, help="side of the images")
    parser.add_argument("--width", type=int, default=512, help="of the features")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each method")
    parser.add_argument("--only", choices=PARTS, help="measure this part alone")
    parser.add_argument("--quick", action="store_true", help="a hundredth of the work")
    add_json_flag(parser)
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags; --quick changes the defaults of others."""
    parser = build_parser()
    if parser.parse_args(argv).quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args(argv)


def _measure_network(args: argparse.Namespace) -> dict[str, Any]:
    contender = Isolated(evaluation.Network, args.model, args.batch_size, args.image_size)
    result = {
        "model": args.model,
        "batch_size": args.batch_size,
        "size": args.image_size,
        **evaluation.measure(contender, ["as_saved", "ours"], args.rounds),
        "difference": contender.call("difference"),
    }
    contender.stop()
    return result


def _measure_megaface(args: argparse.Namespace) -> dict[str, Any]:
    sizes = {"probes": args.probes, "distractors": args.distractors, "width": args.width}
    contender = Isolated(evaluation.MegaFace, *sizes.values())
    result = {
        **sizes,
        **evaluation.measure(contender, [*evaluation.FLOORS, "ours", "loop"], args.rounds),
        "memory_bytes": contender.call("memory"),
    }
    contender.stop()
    return {**result, **evaluation.floor_of(result)}


def _measure_ijb(args: argparse.Namespace) -> dict[str, Any]:
    at_once = evaluation.PAIRS_WRITTEN_AT_ONCE
    pairs = max(args.pairs // at_once, 1) * min(args.pairs, at_once)
    sizes = {"pairs": pairs, "templates": args.templates, "width": args.width}
    with tempfile.TemporaryDirectory() as folder:
        contender = Isolated(evaluation.Ijb, *sizes.values(), folder)
        result = {
            **sizes,
            **evaluation.measure(contender, ["ours", "scores", "insightface"], args.rounds),
            "memory_bytes": contender.call("memory"),
        }
        contender.stop()
    return result


def _measure_search(args: argparse.Namespace) -> dict[str, Any]:
    return search.measure_search(args.gallery, args.width, args.queries, args.rounds)


def _check_memory(flag: str, count: int, width: int) -> None:
    needed = 4 * width * count + (1 << 30)
    if available_bytes() < needed:
        raise ValueError(
            f"--{flag}: {count} vectors of width {width} need {needed / 1e9:.1f} GB, "
            f"{available_bytes() / 1e9:.1f} GB are free; take fewer"
        )


@command(parse=parse)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    parts = [args.only] if args.only else PARTS
    for part, flag in (("megaface", "distractors"), ("search", "gallery")):
        if part in parts:
            _check_memory(flag, getattr(args, flag), args.width)
    report: dict[str, Any] = {"machine": describe_machine()}
    if args.model:
        report["network"] = _measure_network(args)
    measures = {"megaface": _measure_megaface, "ijb": _measure_ijb, "search": _measure_search}
    for part in parts:
        report[part] = measures[part](args)
    if args.json:
        print_json(report, args.json)
    if args.json != "-":
        lines = evaluation.lines_of(report)
        lines += search.lines_of(report["search"]) if "search" in report else []
        print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
