"""Rank probes by MegaFace's protocol: is a mate nearer than any of a million strangers.

For each probe and each of its mates, the gallery consists of that mate and all distractors. The
mate's rank is one plus the number of distractors that score at least as high. So a tie counts
against the mate, and the order of the distractors matters only for the random smaller sets.

The scores of all probes with all distractors, 3.5 billion of them, would not fit into memory: they
are computed block by block, and only those that can still matter are kept.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Iterator, NamedTuple, Sequence

import numpy as np

from dsoftmax.recognition.common.cli import default_threads
from dsoftmax.recognition.common.inner_products import inner_products
from dsoftmax.recognition.common.progress import progress

BLOCK_BYTES = 32 << 20  # of scores per block; there are two
PROBES_PER_BAND = 256  # bands are searched on several threads


class Ranking(NamedTuple):
    """The highest scores of probes with distractors."""

    sizes: list[int]  # numbers of distractors, ascending; the last one is the number of all
    best: np.ndarray  # (sizes, probes), the highest score among that many distractors
    top: np.ndarray  # (probes, k), the k highest among all, descending; -inf if there are fewer
    tail: np.ndarray  # (m,), the highest scores of any probe with any distractor
    total: int  # number of all scores

    def ranks(self, probes: np.ndarray, mate_scores: np.ndarray) -> np.ndarray:
        """Return the ranks of mates, (n,) int; k + 1 stands for all ranks beyond k.

        Parameters
        ----------
        probes : (n,) int
            The probe that each mate belongs to.
        mate_scores : (n,)
        """
        ranks = np.empty(len(probes), np.int64)
        for start in range(0, len(probes), 65536):
            block = slice(start, start + 65536)
            ahead = self.top[probes[block]] >= mate_scores[block, None]
            ranks[block] = 1 + np.count_nonzero(ahead, axis=1)
        return ranks

    def rank1_rates(self, probes: np.ndarray, mate_scores: np.ndarray) -> dict[int, float]:
        """Return the share of mates that come first, by the number of distractors."""
        return {
            size: float(np.mean(mate_scores > best[probes]))
            for size, best in zip(self.sizes, self.best)
        }


def rank_distractors(
    probes: np.ndarray,
    distractors: np.ndarray,
    sizes: Sequence[int] = (),
    most: int = 100,
    tail: float = 1e-4,
    seed: int = 0,
    among: np.ndarray | None = None,
) -> Ranking:
    """Score probes with distractors and keep the scores that matter.

    Parameters
    ----------
    probes : (p, D) float32
    distractors : (n, D) float32
        Of length 1, like the probes; may be mapped from disk.
    sizes : sequence of int
        Numbers of distractors to compute the best scores for, beside all; each set contains the
        smaller ones.
    most : int
        The number of highest scores to keep per probe.
    tail : float
        The share of all scores to keep, the highest ones.
    seed : int
        Decides which distractors are in the smaller sets.
    among : (m,) int, optional
        The distractors that count; by default all.
    """
    among = np.arange(len(distractors)) if among is None else among
    count = len(among)
    if not (len(probes) and count):
        raise ValueError(f"{len(probes)} probes and {count} distractors: there is nothing to rank")
    order = np.random.default_rng(seed).permutation(among)
    sizes = sorted({*(size for size in sizes if 0 < size < count), count})
    parts = list(_cut(sizes, max(BLOCK_BYTES // (4 * len(probes)), 1), 4 * most))
    blocks = inner_products((probes, distractors[order[part]]) for part in parts)
    borders = [*range(0, len(probes), PROBES_PER_BAND), len(probes)]
    bands = [_Band(slice(*rows), min(most, count)) for rows in zip(borders, borders[1:])]
    highest = _Highest(int(tail * len(probes) * count + 1e-9) + 1)  # rounded as metrics.at_far does
    best_at = []
    # numpy would copy rows that are shorter than its buffer before it compares them with a column.
    pool = ThreadPoolExecutor(default_threads(), initializer=np.setbufsize, initargs=(1024,))
    with pool, progress(total=count, desc="ranking", unit="distractors") as bar:
        for block, part in zip(blocks, parts):
            add = functools.partial(_Band.add, block=block, floor=highest.floor)
            for values in pool.map(add, bands):
                highest.add(values)
            if part.stop in sizes:
                best_at.append(np.concatenate([band.top().max(axis=1) for band in bands]))
            bar.update(part.stop - part.start)
    top = np.sort(np.concatenate([band.top() for band in bands]), axis=1)[:, ::-1]
    return Ranking(sizes, np.stack(best_at), top, highest.finish(), len(probes) * count)


def _cut(sizes: list[int], width: int, first: int) -> Iterator[slice]:
    """Cut the distractors into blocks of `width` at most, with a border at each of the sizes.

    The first blocks are small: before there are floors, all their scores matter.
    """
    start = 0
    for size in sizes:
        while start < size:
            stop = min(start + min(width, max(start, first)), size)
            yield slice(start, stop)
            start = stop


class _Band:
    """Keeps the k highest scores of each of some neighbouring probes.

    Parameters
    ----------
    rows : slice
        The probes.
    k : int
    """

    def __init__(self, rows: slice, k: int):
        self._rows = rows
        self._top = np.full((rows.stop - rows.start, k), -np.inf, np.float32)
        self._floor = self._top[:, 0]  # no score at or below it can be among the k highest
        self._begin()

    def _begin(self) -> None:
        self._pending = [(np.zeros(0, np.int64), np.zeros(0, np.float32))]  # rows and scores
        self._pending_size = 0

    def add(self, block: np.ndarray, floor: float) -> np.ndarray:
        """Take the scores of all probes with some distractors, (p, n).

        Returns
        -------
        (m,) float32
            The scores of this band above `floor`, and perhaps lower ones.
        """
        scores = block[self._rows]
        hits = np.flatnonzero(scores > np.minimum(self._floor, floor)[:, None])
        values = scores.reshape(-1)[hits]
        self._pending.append((hits // scores.shape[1], values))
        self._pending_size += len(values)
        if self._pending_size > self._top.size:
            self.top()
        return values

    def top(self) -> np.ndarray:
        """Return the highest scores so far, (probes, k), in any order."""
        rows, values = (np.concatenate(arrays) for arrays in zip(*self._pending))
        self._begin()
        can_be = np.flatnonzero(values > self._floor[rows])
        can_be = can_be[np.argsort(rows[can_be], kind="stable")]
        rows, values = rows[can_be], values[can_be]
        counts = np.bincount(rows, minlength=len(self._top))
        place_in_row = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        k = self._top.shape[1]
        wide = np.full((len(self._top), k + counts.max()), -np.inf, np.float32)
        wide[:, :k] = self._top
        wide[rows, k + place_in_row] = values
        wide.partition(wide.shape[1] - k, axis=1)
        self._top = wide[:, -k:].copy()
        self._floor = self._top[:, 0].copy()  # partitioned: the lowest of them comes first
        return self._top


class _Highest:
    """Keeps the highest of all scores added to it."""

    def __init__(self, count: int):
        self._count = count
        self.floor = np.float32(-np.inf)
        self._values, self._pending = [np.zeros(0, np.float32)], 0

    def add(self, values: np.ndarray) -> None:
        values = values[values > self.floor]
        self._values.append(values)
        self._pending += len(values)
        if self._pending > self._count:
            self._trim()

    def _trim(self) -> None:
        values = np.concatenate(self._values)
        if len(values) > self._count:
            values = np.partition(values, len(values) - self._count)[-self._count :]
        if len(values) == self._count:
            self.floor = values.min()
        self._values, self._pending = [values], 0

    def finish(self) -> np.ndarray:
        self._trim()
        return self._values[0]
