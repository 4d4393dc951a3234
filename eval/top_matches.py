"""Find the nearest of many vectors, exactly, block by block."""

from __future__ import annotations

from typing import Iterable, Iterator, NamedTuple

import numpy as np

from dsoftmax.recognition.common.inner_products import inner_products

ROWS_PER_BLOCK = 2048  # of 512 numbers, as float32: 4 MB, which stay in the processor's cache
QUERIES_PER_PASS = 256
DTYPES = ("float32", "float16", "int8")


class Block(NamedTuple):
    """Neighbouring vectors in the form they are kept in."""

    vectors: np.ndarray  # (n, D) of one of `DTYPES`
    scales: np.ndarray | None = None  # (n,) float32; int8 times scale has length 1


class Matches(NamedTuple):
    """The best vectors of each query, the best first."""

    places: np.ndarray  # (queries, k) int; -1 where there are fewer
    cosines: np.ndarray  # (queries, k) float32; -inf where there are fewer


def compress(vectors: np.ndarray, dtype: str) -> Block:
    """Turn vectors (n, D) of length 1 into the form they are kept in."""
    if dtype != "int8":
        return Block(vectors.astype(dtype))
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    codes = np.rint(vectors * (127 / np.where(largest > 0, largest, 1))).astype(np.int8)
    lengths = np.linalg.norm(codes.astype(np.float32), axis=1)
    return Block(codes, (1 / np.where(lengths > 0, lengths, 1)).astype(np.float32))


def top_matches(
    queries: np.ndarray, parts: Iterable[Block], k: int, groups: np.ndarray | None = None
) -> Matches:
    """Find the k nearest vectors of each query.

    Parameters
    ----------
    queries : (q, D) float32
        Of length 1.
    parts : sequence of Block
        All vectors, perhaps mapped from disk. They are numbered through.
    k : int
    groups : (n,) int, optional
        Whom each vector belongs to: at most one vector, the best, is taken of each.

    Returns
    -------
    Matches
        Of equal cosines the vector with the lower number comes first.
    """
    parts = list(parts)
    found = [
        _search(queries[start : start + QUERIES_PER_PASS], parts, k, groups)
        for start in range(0, len(queries), QUERIES_PER_PASS)
    ]
    return Matches(*(np.concatenate(arrays) for arrays in zip(*found)))


def _search(queries: np.ndarray, parts: list[Block], k: int, groups: np.ndarray | None) -> Matches:
    best = _Best(len(queries), k, groups)
    blocks = list(_cut(parts))
    start = 0
    products = inner_products((queries, block.vectors) for block in blocks)
    for block, cosines in zip(blocks, products):
        if block.scales is not None:
            cosines *= block.scales
        best.add(start, cosines)
        start += len(block.vectors)
    return best.matches()


def _cut(parts: list[Block]) -> Iterator[Block]:
    for vectors, scales in parts:
        for start in range(0, len(vectors), ROWS_PER_BLOCK):
            rows = slice(start, start + ROWS_PER_BLOCK)
            yield Block(vectors[rows], None if scales is None else scales[rows])


class _Best:
    """Keeps the k best vectors of each query."""

    def __init__(self, queries: int, k: int, groups: np.ndarray | None):
        self._groups = groups
        self._places = np.full((queries, k), -1)
        self._cosines = np.full((queries, k), -np.inf, np.float32)

    def add(self, start: int, cosines: np.ndarray) -> None:
        """Take the cosines (queries, n) with vectors `start`, `start` + 1, and so on."""
        # A vector that only equals the last of the best comes too late.
        rows, columns = np.nonzero(cosines > self._cosines[:, -1:])
        borders = np.searchsorted(rows, np.arange(len(cosines) + 1))
        for row in np.unique(rows):
            new = columns[borders[row] : borders[row + 1]]
            self._merge(row, start + new, cosines[row, new])

    def _merge(self, row: int, places: np.ndarray, cosines: np.ndarray) -> None:
        places = np.concatenate([self._places[row], places])
        cosines = np.concatenate([self._cosines[row], cosines])
        order = np.argsort(-cosines, kind="stable")
        order = order[cosines[order] > -np.inf]
        if self._groups is not None:
            _, first = np.unique(self._groups[places[order]], return_index=True)
            order = order[np.sort(first)]
        order = order[: self._places.shape[1]]
        self._places[row, : len(order)] = places[order]
        self._cosines[row, : len(order)] = cosines[order]

    def matches(self) -> Matches:
        return Matches(self._places, self._cosines)
