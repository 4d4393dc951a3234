"""Evaluate random features at the size of MegaFace and IJB-C, by our methods and by others."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any, Callable, Sequence

import numpy as np

from dsoftmax.eval import metrics, plots, templates
from dsoftmax.eval.distractors import BLOCK_BYTES, rank_distractors
from dsoftmax.eval.models import load_model, parse_models
from dsoftmax.recognition.common.memory import forget_peak, peak_bytes, resident_bytes
from dsoftmax.recognition.common.preflight import mxnet
from dsoftmax.tools.benchmarks.measuring import Isolated

SIZES = (10, 100, 1_000, 10_000, 100_000)
FLOORS = {"numpy": "numpy", "fully_connected": "FullyConnected"}  # ways to multiply: their names
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
    """Measure how long a piece of work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def extra_memory(work: Callable[[], Any]) -> int:
    """Measure the most memory, in bytes, that a piece of work takes beyond the present use."""
    forget_peak()
    before = resident_bytes()
    work()
    return peak_bytes() - before


class MegaFace:
    """Ranks probes among distractors by our method and by others."""

    def __init__(self, probes: int, distractors: int, width: int):
        self._probes = random_directions(probes, width, 1)
        self._distractors = random_directions(distractors, width, 2)

    def _rank(self) -> None:
        rank_distractors(self._probes, self._distractors, SIZES)

    def ours(self) -> float:
        """Rank all probes."""
        return seconds(self._rank)

    def memory(self) -> int:
        """Measure the memory of `ours`."""
        return extra_memory(self._rank)

    def _blocks(self) -> list[np.ndarray]:
        columns = max(BLOCK_BYTES // (4 * len(self._probes)), 1)
        starts = range(0, len(self._distractors), columns)
        return [self._distractors[start : start + columns] for start in starts]

    def numpy(self) -> float:
        """Multiply the matrices with numpy and do nothing else."""
        blocks = self._blocks()
        memory = np.empty(len(self._probes) * len(blocks[0]), np.float32)
        memory.fill(0)  # fresh memory is slow

        def multiply() -> None:
            for block in blocks:
                shape = (len(self._probes), len(block))
                out = memory[: shape[0] * shape[1]].reshape(shape)
                np.matmul(self._probes, block.T, out=out)

        return seconds(multiply)

    def fully_connected(self) -> float:
        """Multiply the matrices with MXNet's `FullyConnected` and do nothing else."""
        nd = mxnet().nd
        blocks = self._blocks()
        # The products of whole blocks are alike; a copy of all distractors may not fit into memory.
        copies = {len(block): nd.array(block) for block in blocks}
        outputs = {size: nd.zeros((len(self._probes), size)) for size in copies}
        probes = nd.array(self._probes)
        nd.waitall()

        def multiply() -> None:
            for size in map(len, blocks):
                options = {"num_hidden": size, "no_bias": True, "out": outputs[size]}
                nd.FullyConnected(probes, copies[size], **options)
            nd.waitall()

        return seconds(multiply)

    def loop(self) -> float:
        """Score probe by probe, a few of them, and estimate how long all would take."""
        some = self._probes[: max(len(self._probes) // 500, 3)]

        def score() -> None:
            for probe in some:
                np.sort(self._distractors @ probe)[-100:]

        return seconds(score) * len(self._probes) / len(some)


class Network:
    """Embeds random images with a network, as it was saved and rewritten for CPUs."""

    def __init__(self, model: str, batch_size: int, size: int):
        name, contexts = parse_models(model)[0], [mxnet().cpu()]
        self._images = np.random.default_rng(0).integers(
            0, 256, (batch_size, 3, size, size), np.uint8
        )
        self._embed = {
            rewrite: load_model(name, contexts, rewrite=rewrite) for rewrite in (True, False)
        }
        for embed in self._embed.values():
            embed(self._images)

    def ours(self) -> float:
        """Embed a batch by the rewritten graph."""
        return seconds(lambda: self._embed[True](self._images))

    def as_saved(self) -> float:
        """Embed a batch by the graph of the file."""
        return seconds(lambda: self._embed[False](self._images))

    def difference(self) -> float:
        """Return the largest difference of both, relative to the largest number."""
        one, other = (self._embed[rewrite](self._images) for rewrite in (True, False))
        return float(np.abs(one - other).max() / np.abs(other).max())


class Ijb:
    """Scores pairs of templates by our method and by insightface's."""

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
        """Measure the memory of `ours`."""
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


def measure(contender: Isolated, ways: Sequence[str], rounds: int) -> dict[str, Any]:
    """Run all ways in turns; return the median seconds of each."""
    seconds_of: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            seconds_of[way].append(contender.call(way))
    medians = {way: statistics.median(times) for way, times in seconds_of.items()}
    return {"seconds": medians, "all_seconds": seconds_of}


def floor_of(megaface: dict[str, Any]) -> dict[str, Any]:
    """Return the fastest of the `FLOORS` of MegaFace's measurements, and the ratio to it."""
    times = megaface["seconds"]
    fastest = min(FLOORS, key=times.get)
    # Both were measured one after the other, under the same load of the machine.
    turns = zip(megaface["all_seconds"]["ours"], megaface["all_seconds"][fastest])
    ratio = statistics.median(ours / floor for ours, floor in turns)
    return {"floor": fastest, "floor_seconds": times[fastest], "ratio": ratio}


def lines_of(report: dict[str, Any]) -> list[str]:
    """Lay out the figures for people."""
    lines = ["{processor}, {cores} cores, {memory_gb} GB".format(**report["machine"])]
    parts = {"megaface": _megaface_lines, "ijb": _ijb_lines, "network": _network_lines}
    for part, lines_of_part in parts.items():
        lines += lines_of_part(report[part]) if part in report else []
    return lines


def _megaface_lines(of: dict[str, Any]) -> list[str]:
    times = of["seconds"]
    ways = ", ".join(f"{FLOORS[way]} {times[way]:.2f} s" for way in FLOORS)
    return [
        f"MegaFace, {of['probes']:,} probes x {of['distractors']:,} distractors x {of['width']}:",
        f"  ranking                {times['ours']:9.2f} s   {of['ratio']:.2f} x its floor",
        f"  bare products          {of['floor_seconds']:9.2f} s   the fastest of: {ways}",
        f"  a loop over probes     {times['loop']:9.2f} s   "
        f"{times['loop'] / times['ours']:.0f} x ours (estimated from a few)",
        f"  memory above features  {of['memory_bytes'] / 1e6:9.0f} MB",
    ]


def _ijb_lines(of: dict[str, Any]) -> list[str]:
    times = of["seconds"]
    return [
        f"IJB-C, {of['pairs']:,} pairs of {of['templates']:,} templates x {of['width']}:",
        f"  file to rates          {times['ours']:9.2f} s",
        f"  scores alone           {times['scores']:9.2f} s",
        f"  as insightface         {times['insightface']:9.2f} s   "
        f"{times['insightface'] / times['scores']:.1f} x ours",
        f"  memory above features  {of['memory_bytes'] / 1e6:9.0f} MB",
    ]


def _network_lines(of: dict[str, Any]) -> list[str]:
    ours, as_saved = (of["batch_size"] / of["seconds"][way] for way in ("ours", "as_saved"))
    return [
        f"{of['model']}, batches of {of['batch_size']} images of {of['size']}x{of['size']}:",
        f"  rewritten for CPUs     {ours:9.1f} images/s   {ours / as_saved:.1f} x as saved",
        f"  as saved               {as_saved:9.1f} images/s",
        f"  largest difference     {of['difference']:9.1e} of the largest number",
    ]
