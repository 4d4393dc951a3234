"""Measure the evaluation at the size of MegaFace and IJB-C, on random features.

    python tools/bench_eval.py             3,530 probes, 1,000,000 distractors; 15.6 million pairs
    python tools/bench_eval.py --quick     a hundredth of that

MegaFace: ranking all probes among all distractors, against its floor, the bare matrix products, and
against a plain loop over probes (measured on a few of them). IJB-C: from the file of pairs to the
rates and the curve, against insightface's way of scoring pairs 100,000 at a time. All in turns,
medians; memory is the highest of the process above the features.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from typing import Any, Callable

import numpy as np

from dsoftmax.eval import metrics, plots, templates
from dsoftmax.eval.distractors import BLOCK_BYTES, rank_distractors
from dsoftmax.recognition.common.cli import add_json_flag, command, print_json
from dsoftmax.recognition.common.memory import (
    available_bytes,
    forget_peak,
    peak_bytes,
    resident_bytes,
)
from dsoftmax.tools.benchmarks.measuring import Apart, describe_machine

SIZES = (10, 100, 1_000, 10_000, 100_000)
ROWS_PER_DRAW = 20_000
PAIRS_WRITTEN_AT_ONCE = 100_000


def random_directions(count: int, width: int, seed: int) -> np.ndarray:
    """Return random vectors of length 1, (count, width) float32."""
    draw = np.random.default_rng(seed)
    vectors = np.empty((count, width), np.float32)
    for start in range(0, count, ROWS_PER_DRAW):
        rows = vectors[start : start + ROWS_PER_DRAW]
        draw.standard_normal(out=rows, dtype=np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return vectors


def seconds(work: Callable[[], Any]) -> float:
    """Return how long something takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def extra_memory(work: Callable[[], Any]) -> int:
    """Return the most memory a piece of work takes above what was there, in bytes."""
    forget_peak()
    before = resident_bytes()
    work()
    return peak_bytes() - before


class MegaFace:
    """Probes among distractors, ranked here and in other ways."""

    def __init__(self, probes: int, distractors: int, width: int):
        self._probes = random_directions(probes, width, 1)
        self._distractors = random_directions(distractors, width, 2)

    def _rank(self) -> None:
        rank_distractors(self._probes, self._distractors, SIZES)

    def ours(self) -> float:
        """Rank all probes."""
        return seconds(self._rank)

    def memory(self) -> int:
        """Measure the memory of it."""
        return extra_memory(self._rank)

    def floor(self) -> float:
        """Multiply the matrices and do nothing else."""
        columns = max(BLOCK_BYTES // (4 * len(self._probes)), 1)
        scores = np.empty((len(self._probes), min(columns, len(self._distractors))), np.float32)

        def multiply() -> None:
            for start in range(0, len(self._distractors), columns):
                block = self._distractors[start : start + columns]
                if len(block) == scores.shape[1]:
                    np.matmul(self._probes, block.T, out=scores)
                else:
                    np.matmul(self._probes, block.T)

        return seconds(multiply)

    def loop(self) -> float:
        """Score probe by probe, a few of them, and estimate how long all would take."""
        some = self._probes[: max(len(self._probes) // 500, 3)]

        def score() -> None:
            for probe in some:
                np.sort(self._distractors @ probe)[-100:]

        return seconds(score) * len(self._probes) / len(some)


class Ijb:
    """Pairs of templates, scored here and as insightface does."""

    def __init__(self, pairs: int, count: int, width: int, folder: str):
        ids = np.arange(1, count + 1)
        self._templates = templates.Templates(ids, random_directions(count, width, 1))
        self._path = os.path.join(folder, "pairs.txt")
        part = min(pairs, PAIRS_WRITTEN_AT_ONCE)
        draw = np.random.default_rng(2)
        table = np.column_stack(
            [draw.integers(1, count + 1, (part, 2)), draw.random(part) < 0.00125]
        )
        table[:2, 2] = 0, 1  # at least one of each kind
        text = "".join(f"{one} {other} {same}\n" for one, other, same in table.tolist())
        with open(self._path, "w", encoding="ascii") as file:
            for _ in range(pairs // part):
                file.write(text)

    def _evaluate(self) -> None:
        pairs = templates.read_pairs(self._path)
        scores = templates.pair_scores(self._templates, pairs)
        genuine, impostor = scores[pairs.issame], scores[~pairs.issame]
        metrics.at_far(genuine, impostor, [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
        plots.sample_roc(genuine, impostor)
        plots.bin_scores(genuine, impostor)

    def ours(self) -> float:
        """Go from the file to the rates."""
        return seconds(self._evaluate)

    def memory(self) -> int:
        """Measure the memory of it."""
        return extra_memory(self._evaluate)

    def scores(self) -> float:
        """Score the pairs and do nothing else."""
        pairs = templates.read_pairs(self._path)
        return seconds(lambda: templates.pair_scores(self._templates, pairs))

    def insightface(self) -> float:
        """Score the pairs 100,000 at a time on one thread."""
        pairs = templates.read_pairs(self._path)
        first, second = (ids - 1 for ids in (pairs.first, pairs.second))
        features = self._templates.features

        def score() -> None:
            for start in range(0, len(first), 100_000):
                block = slice(start, start + 100_000)
                np.sum(features[first[block]] * features[second[block]], axis=-1)

        return seconds(score)


def measure(made: Apart, ways: list[str], rounds: int) -> dict[str, Any]:
    """Run all ways in turns; return the median seconds of each, and the memory of ours."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            found[way].append(made.ask(way))
    medians = {way: statistics.median(times) for way, times in found.items()}
    return {"seconds": medians, "all_seconds": found, "memory_bytes": made.ask("memory")}


def lines_of(report: dict[str, Any]) -> list[str]:
    """Lay the figures out for people."""
    of, times = report["megaface"], report["megaface"]["seconds"]
    lines = [
        "{processor}, {cores} cores, {memory_gb} GB".format(**report["machine"]),
        f"MegaFace, {of['probes']:,} probes x {of['distractors']:,} distractors x {of['width']}:",
        f"  ranking                {times['ours']:9.2f} s   "
        f"{times['ours'] / times['floor']:.2f} x its floor",
        f"  bare products          {times['floor']:9.2f} s",
        f"  a loop over probes     {times['loop']:9.2f} s   "
        f"{times['loop'] / times['ours']:.0f} x ours (estimated from a few)",
        f"  memory above features  {of['memory_bytes'] / 1e6:9.0f} MB",
    ]
    of, times = report["ijb"], report["ijb"]["seconds"]
    return [
        *lines,
        f"IJB-C, {of['pairs']:,} pairs of {of['templates']:,} templates x {of['width']}:",
        f"  file to rates          {times['ours']:9.2f} s",
        f"  scores alone           {times['scores']:9.2f} s",
        f"  as insightface         {times['insightface']:9.2f} s   "
        f"{times['insightface'] / times['scores']:.1f} x ours",
        f"  memory above features  {of['memory_bytes'] / 1e6:9.0f} MB",
    ]


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="bench_eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--probes", type=int, default=3_530, help="%(default)s")
    parser.add_argument("--distractors", type=int, default=1_000_000, help="%(default)s")
    parser.add_argument("--pairs", type=int, default=15_600_000, help="%(default)s")
    parser.add_argument("--templates", type=int, default=23_124, help="%(default)s")
    parser.add_argument("--width", type=int, default=512, help="%(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--quick", action="store_true", help="a hundredth of the work")
    add_json_flag(parser)
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(distractors=20_000, probes=1_000, pairs=200_000, templates=2_000)
        args = parser.parse_args(argv)
    needed = 4 * args.width * args.distractors + (1 << 30)
    if available_bytes() < needed:
        raise ValueError(
            f"{args.distractors} distractors of width {args.width} need {needed / 1e9:.1f} GB, "
            f"{available_bytes() / 1e9:.1f} GB are free; take fewer --distractors"
        )
    report: dict[str, Any] = {"machine": describe_machine()}
    sizes = {"probes": args.probes, "distractors": args.distractors, "width": args.width}
    made = Apart(MegaFace, *sizes.values())
    report["megaface"] = {**sizes, **measure(made, ["floor", "ours", "loop"], args.rounds)}
    made.stop()
    pairs = max(args.pairs // PAIRS_WRITTEN_AT_ONCE, 1) * min(args.pairs, PAIRS_WRITTEN_AT_ONCE)
    sizes = {"pairs": pairs, "templates": args.templates, "width": args.width}
    with tempfile.TemporaryDirectory() as folder:
        made = Apart(Ijb, *sizes.values(), folder)
        report["ijb"] = {**sizes, **measure(made, ["ours", "scores", "insightface"], args.rounds)}
        made.stop()
    if args.json:
        print_json(report, args.json)
    if args.json != "-":
        print("\n".join(lines_of(report)))


if __name__ == "__main__":
    sys.exit(main())
