"""Rank probes by MegaFace's protocol: is a mate nearer than any of a million strangers.

For each probe and each of its mates, the gallery consists of that mate and all distractors. The
mate's rank is one plus the number of distractors that score at least as high. So a tie counts
against the mate, and the order of the distractors matters only for the random smaller sets.

The scores of all probes with all distractors, 3.5 billion of them, would not fit into memory: they
are computed block by block, and only those that can still matter are kept.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np

from dsoftmax.recognition.common.inner_products import InnerProducts
from dsoftmax.recognition.common.progress import progress

BLOCK_BYTES = 128 << 20  # of scores per block


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
    width = max(BLOCK_BYTES // (4 * len(probes)), 1)
    products = InnerProducts(probes, min(width, count))
    is_high = np.empty(len(probes) * min(width, count), bool)
    best = np.full(len(probes), -np.inf, np.float32)
    best_at, start = [], 0
    top = _TopOfEach(len(probes), min(most, count))
    highest = _Highest(int(tail * len(probes) * count + 1e-9) + 1)  # rounded as metrics.at_far does
    with progress(total=count, desc="ranking", unit="distractors") as bar:
        for size in sizes:
            while start < size:
                # The first blocks are small: before there are floors, all their scores matter.
                stop = min(start + min(width, max(start, 4 * most)), size)
                block = products(distractors[order[start:stop]])
                np.maximum(best, block.max(axis=1), out=best)
                floor = np.minimum(top.floor, highest.floor)
                mask = is_high[: block.size].reshape(block.shape)
                np.greater(block, floor[:, None], out=mask)
                hits = np.flatnonzero(mask)
                values = block.reshape(-1)[hits]
                top.add((hits // block.shape[1]).astype(np.int32), values)
                highest.add(values)
                bar.update(stop - start)
                start = stop
            best_at.append(best.copy())
    return Ranking(sizes, np.stack(best_at), top.finish(), highest.finish(), len(probes) * count)


class _TopOfEach:
    """Keeps the k highest scores of each row; no score at or below `floor` can be among them."""

    def __init__(self, rows: int, k: int):
        self._top = np.full((rows, k), -np.inf, np.float32)
        self.floor = np.full(rows, -np.inf, np.float32)

    def add(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Take new values and the rows they belong to, in ascending order of rows."""
        can_be = values > self.floor[rows]
        rows, values = rows[can_be], values[can_be]
        counts = np.bincount(rows, minlength=len(self.floor))
        place_in_row = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        k = self._top.shape[1]
        wide = np.full((len(self.floor), k + counts.max()), -np.inf, np.float32)
        wide[:, :k] = self._top
        wide[rows, k + place_in_row] = values
        wide.partition(wide.shape[1] - k, axis=1)
        self._top = wide[:, -k:].copy()
        self.floor = self._top[:, 0].copy()  # partitioned: the lowest of them comes first

    def finish(self) -> np.ndarray:
        return np.sort(self._top, axis=1)[:, ::-1]


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
