"""Find all pairs of vectors that are near to each other, and decide which of them stay."""

from __future__ import annotations

import itertools

import numpy as np

from dsoftmax.recognition.common.inner_products import inner_products
from dsoftmax.recognition.common.progress import progress

ROWS_PER_BLOCK = 4096  # 64 MB of cosines at a time, of which there are two
MOST_PAIRS_PER_VECTOR = 64


class TooManyPairsError(ValueError):
    """The threshold is so low that most pairs are near."""


def near_pairs(vectors: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Find all pairs of vectors whose cosine reaches a threshold.

    All pairs are compared, a block at a time; only the near ones are kept.

    Parameters
    ----------
    vectors : (n, D) float32
        Of length 1.
    threshold : float

    Returns
    -------
    pairs : (m, 2) int64
        The smaller number first.
    cosines : (m,) float32
    """
    count = len(vectors)
    starts = range(0, count, ROWS_PER_BLOCK)
    blocks = list(itertools.combinations_with_replacement(starts, 2))
    products = inner_products(
        (vectors[row : row + ROWS_PER_BLOCK], vectors[column : column + ROWS_PER_BLOCK])
        for row, column in blocks
    )
    pairs, cosines, found = [np.empty((0, 2), np.int64)], [np.empty(0, np.float32)], 0
    with progress(total=count * (count + 1) // 2, desc="comparing", unit="pairs") as bar:
        for block, (row, column) in zip(products, blocks):
            hits = np.flatnonzero(block >= threshold)
            rows, columns = row + hits // block.shape[1], column + hits % block.shape[1]
            is_pair = rows < columns  # a block on the diagonal has each pair twice, and itself
            pairs.append(np.stack([rows, columns], axis=1)[is_pair])
            cosines.append(block.reshape(-1)[hits[is_pair]])
            found += len(pairs[-1])
            if found > MOST_PAIRS_PER_VECTOR * count:
                raise TooManyPairsError(
                    f"more than {found} pairs of {count} have a cosine of {threshold:.3f} or more"
                )
            bar.update(block.size if row != column else len(block) * (len(block) + 1) // 2)
    return np.concatenate(pairs), np.concatenate(cosines)


def absorb(pairs: np.ndarray, rank: np.ndarray) -> dict[int, int]:
    """Let the first of near things take in those that are near to it.

    What has been taken in takes in nothing itself: so a chain of pairs does not make one of things
    that are far from each other.

    Parameters
    ----------
    pairs : (m, 2) int
    rank : (n,)
        Of all things; the lowest comes first.

    Returns
    -------
    dict of int to int
        The thing that takes it in, for each that does not stay.
    """
    neighbours: dict[int, list[int]] = {}
    for one, other in pairs.tolist():
        neighbours.setdefault(one, []).append(other)
        neighbours.setdefault(other, []).append(one)
    taken_by: dict[int, int] = {}
    for thing in sorted(neighbours, key=lambda thing: (rank[thing], thing)):
        if thing not in taken_by:
            taken_by[thing] = thing
            for neighbour in neighbours[thing]:
                taken_by.setdefault(neighbour, thing)
    return {thing: taker for thing, taker in taken_by.items() if thing != taker}
