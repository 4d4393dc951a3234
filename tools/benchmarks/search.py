"""Search a gallery of random vectors, against the bare memory traffic and the bare products."""

from __future__ import annotations

import statistics
from typing import Any, Sequence

import numpy as np

from dsoftmax.eval.top_matches import DTYPES, ROWS_PER_BLOCK, Block, compress, top_matches
from dsoftmax.recognition.common.inner_products import inner_products
from dsoftmax.tools.benchmarks.evaluation import (
    ROWS_PER_DRAW,
    extra_memory,
    measure,
    random_directions,
    seconds,
)
from dsoftmax.tools.benchmarks.measuring import Isolated

TOP = 5


class Search:
    """Searches vectors that are kept in one form.

    Parameters
    ----------
    count, width : int
        Of the gallery.
    queries : int
        Asked at once. Each is a vector of the gallery, turned to a cosine of 0.6 or so.
    dtype : {"float32", "float16", "int8"}
    """

    def __init__(self, count: int, width: int, queries: int, dtype: str):
        draws = range(0, count, ROWS_PER_DRAW)
        blocks = (
            compress(random_directions(min(ROWS_PER_DRAW, count - start), width, start), dtype)
            for start in draws
        )
        vectors = np.empty((count, width), dtype)
        scales = np.empty(count, np.float32) if dtype == "int8" else None
        for start, block in zip(draws, blocks):
            vectors[start : start + ROWS_PER_DRAW] = block.vectors
            if scales is not None:
                scales[start : start + ROWS_PER_DRAW] = block.scales
        self._parts = [Block(vectors, scales)]
        mates = random_directions(min(ROWS_PER_DRAW, count), width, 0)[:queries]
        turned = mates + 1.3 * random_directions(len(mates), width, 1)
        self._queries = turned / np.linalg.norm(turned, axis=1, keepdims=True)

    def _search(self, queries: int) -> None:
        top_matches(self._queries[:queries], self._parts, TOP)

    def one(self) -> float:
        """Search for one query."""
        return seconds(lambda: self._search(1))

    def batch(self) -> float:
        """Search for all queries at once."""
        return seconds(lambda: self._search(len(self._queries)))

    def traffic(self) -> float:
        """Read all vectors from memory and do nothing else."""
        vectors = self._parts[0].vectors
        cached = np.zeros_like(vectors[:ROWS_PER_BLOCK])

        def read() -> None:
            for start in range(0, len(vectors), ROWS_PER_BLOCK):
                rows = vectors[start : start + ROWS_PER_BLOCK]
                np.copyto(cached[: len(rows)], rows)

        return seconds(read)

    def products(self) -> float:
        """Multiply as many float32 vectors with all queries, and do nothing else."""
        vectors = self._parts[0].vectors
        block = vectors[:ROWS_PER_BLOCK].astype(np.float32)
        blocks = -(-len(vectors) // ROWS_PER_BLOCK)

        def multiply() -> None:
            for _ in inner_products((self._queries, block) for _ in range(blocks)):
                pass

        return seconds(multiply)

    def memory(self) -> int:
        """Measure the memory of `batch`."""
        return extra_memory(lambda: self._search(len(self._queries)))

    def places(self) -> list[list[int]]:
        """Return the vectors found, (queries, TOP)."""
        return top_matches(self._queries, self._parts, TOP).places.tolist()


def measure_search(count: int, width: int, queries: int, rounds: int) -> dict[str, Any]:
    """Measure all forms that vectors are kept in; ratios are of turns taken one after the other."""
    forms, places = {}, {}
    for dtype in DTYPES:
        contender = Isolated(Search, count, width, queries, dtype)
        places[dtype] = contender.call("places")  # and everything is warm
        result = measure(contender, ["traffic", "one", "products", "batch"], rounds)
        times = result["all_seconds"]
        forms[dtype] = {
            **result,
            "one_ratio": _ratio(times["one"], times["traffic"]),
            "batch_ratio": _ratio(times["batch"], times["products"]),
            "memory_bytes": contender.call("memory"),
            "bytes": count * (width * np.dtype(dtype).itemsize + 4 * (dtype == "int8")),
            "same_first": _agreement(places[dtype], places["float32"], 1),
            "same_top": _agreement(places[dtype], places["float32"], TOP),
        }
        contender.stop()
    return {"gallery": count, "width": width, "queries": queries, "top": TOP, "forms": forms}


def _ratio(ours: Sequence[float], floor: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, floor))


def _agreement(found: list[list[int]], expected: list[list[int]], top: int) -> float:
    """Return the share of the `top` expected places that were found among as many."""
    shared = [len({*one[:top]} & {*other[:top]}) for one, other in zip(found, expected)]
    return sum(shared) / (top * len(expected))


def lines_of(of: dict[str, Any]) -> list[str]:
    """Lay out the figures for people."""
    lines = [
        f"Search, {of['gallery']:,} vectors x {of['width']}, one query and {of['queries']} at once:"
    ]
    for dtype, form in of["forms"].items():
        times = form["seconds"]
        lines += [
            f"  {dtype:8} {form['bytes'] / 1e6:6.0f} MB   one {times['one']:.3f} s, "
            f"{form['one_ratio']:.2f} x reading them; {of['queries']} at once "
            f"{times['batch'] / of['queries']:.4f} s each, {form['batch_ratio']:.2f} x the bare "
            "products",
            f"  {'':8} {form['memory_bytes'] / 1e6:6.0f} MB above the vectors; as float32: "
            f"{form['same_first']:.2%} of the first, {form['same_top']:.2%} of the first "
            f"{of['top']}",
        ]
    return lines
