"""Changes to a set of classes: which are left, in which order, joined with which, and new ones.

Class weights and the states of their optimizer change together. They are rows that are read while
the result is written, so that there may be more of them than memory holds.
"""

from __future__ import annotations

from typing import Dict, Iterator, NamedTuple

import numpy as np

from dsoftmax.losses.stores.base import WEIGHT
from dsoftmax.recognition.common.inner_products import inner_products
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.common.rows import Rows
from dsoftmax.recognition.common.vectors import normalized

COMPARED_AT_ONCE = 2048  # classes

ClassArrays = Dict[str, Rows]
"""Class weights under `WEIGHT`, and the states of their optimizer, (K, D) each."""


class LabelMap(NamedTuple):
    """Which new label each old one gets; old ones that are not listed are dropped.

    Several old labels may get the same new one: they become one class.

    Attributes
    ----------
    old, new : (n,) int64
    shares : (n,)
        How much an old class counts if others become the same one, such as its number of images.
    """

    old: np.ndarray
    new: np.ndarray
    shares: np.ndarray

    @classmethod
    def of(cls, old, new, shares=None) -> LabelMap:
        """Make a map; by default all classes count alike."""
        old, new = (np.asarray(labels, np.int64) for labels in (old, new))
        return cls(old, new, np.ones(len(old)) if shares is None else np.asarray(shares, float))


def dropping(num_classes: int, classes: np.ndarray) -> LabelMap:
    """Return the map that leaves classes out and numbers the others without gaps."""
    _check_labels(classes, num_classes)
    kept = np.setdiff1d(np.arange(num_classes), classes)
    if not len(kept):
        raise ValueError(f"all {num_classes} classes would be dropped: leave at least one")
    return LabelMap.of(kept, np.arange(len(kept)))


def merging(num_classes: int, classes: np.ndarray, shares: np.ndarray | None = None) -> LabelMap:
    """Return the map that makes some classes one, under their lowest label, without gaps."""
    _check_labels(classes, num_classes)
    if len(np.unique(classes)) != len(classes) or len(classes) < 2:
        raise ValueError("a merger takes two classes or more, each named once")
    counts = np.ones(num_classes)
    if shares is not None:
        counts[classes] = shares
    new = np.arange(num_classes)
    new[classes] = min(classes)
    return LabelMap.of(np.arange(num_classes), np.unique(new, return_inverse=True)[1], counts)


def _check_labels(classes: np.ndarray, num_classes: int) -> None:
    classes = np.asarray(classes)
    bad = classes[(classes < 0) | (classes >= num_classes)]
    if len(bad):
        raise ValueError(f"there is no class {bad[0]}: there are {num_classes}, from 0 on")


def rearrange(
    classes: ClassArrays, labels: LabelMap, added: dict[int, np.ndarray] | None = None
) -> ClassArrays:
    """Return classes under new labels.

    A class that is moved keeps its bits. Of several that become one, weights and states are the
    mean, by shares; the weights get the mean length, which a mean of different directions is too
    short for. New classes begin with states of zero.

    Parameters
    ----------
    classes : ClassArrays
    labels : LabelMap
    added : dict of int to (D,)
        The weights of new classes, by label.

    Raises
    ------
    ValueError
        A label is listed twice, or nobody has it.
    """
    added = added or {}
    before = len(classes[WEIGHT])
    count = _check_map(labels, before, added)
    is_single = np.bincount(labels.new, minlength=count)[labels.new] == 1
    joined, groups = _groups(labels, ~is_single)
    # Rows of the result: of the old classes, of those that were joined, of the new ones.
    order = np.empty(count, np.int64)
    order[labels.new[is_single]] = labels.old[is_single]
    order[joined] = before + np.arange(len(joined))
    order[list(added)] = before + len(joined) + np.arange(len(added))
    rearranged = {}
    for name, rows in classes.items():
        parts = rows
        if len(joined):
            means = [_mean(rows, labels, group, name == WEIGHT) for group in groups]
            parts = parts.followed_by(Rows([np.stack(means)]))
        if added:
            new = np.broadcast_to(np.float32(0), (len(added), rows.shape[1]))
            if name == WEIGHT:
                new = np.stack(list(added.values())).astype(np.float32)
            parts = parts.followed_by(Rows([new]))
        rearranged[name] = parts.ordered(order)
    return rearranged


def _check_map(labels: LabelMap, before: int, added: dict[int, np.ndarray]) -> int:
    """Return the number of new labels, if each belongs to somebody."""
    _check_labels(labels.old, before)
    if len(np.unique(labels.old)) < len(labels.old):
        twice = np.flatnonzero(np.bincount(labels.old) > 1)[0]
        raise ValueError(f"the old label {twice} is listed twice")
    taken = np.union1d(labels.new, np.fromiter(added, np.int64, len(added)))
    count = int(taken[-1]) + 1
    nobody = np.setdiff1d(np.arange(count), taken)
    if len(nobody):
        raise ValueError(
            f"{len(nobody)} of the {count} new labels belong to no class, {nobody[0]} is the first"
        )
    if len(taken) < len(np.unique(labels.new)) + len(added):
        raise ValueError("a new class has the label of an old one")
    return count


def _groups(labels: LabelMap, is_joined: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the labels that several classes get, and the places of these in the map."""
    places = np.flatnonzero(is_joined)
    places = places[np.argsort(labels.new[places], kind="stable")]
    joined, starts = np.unique(labels.new[places], return_index=True)
    return joined, np.split(places, starts[1:])


def _mean(rows: Rows, labels: LabelMap, group: np.ndarray, keeps_length: bool) -> np.ndarray:
    """Return the mean of the rows that become one class, (D,)."""
    vectors = rows.take(labels.old[group]).astype(np.float64)
    shares = labels.shares[group]
    if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.sum() > 0):
        raise ValueError(f"shares are numbers of which none is negative, not {shares.tolist()}")
    mean = np.average(vectors, axis=0, weights=shares)
    if keeps_length:
        length = np.linalg.norm(mean)
        if not length:
            raise ValueError(
                f"the classes {labels.old[group].tolist()} have opposite weights and no mean: "
                "drop one of them"
            )
        mean *= np.average(np.linalg.norm(vectors, axis=1), weights=shares) / length
    return mean.astype(np.float32)


def join(first: ClassArrays, second: ClassArrays) -> ClassArrays:
    """Return the classes of two heads, the second one's labels after the first one's."""
    if set(first) != set(second):
        counts = [len(classes) - 1 for classes in (first, second)]
        raise ValueError(
            f"their optimizers have {counts[0]} and {counts[1]} states per class: heads can be "
            "joined if they were trained by the same optimizer, both with momentum or both without"
        )
    return {name: rows.followed_by(second[name]) for name, rows in first.items()}


def lengths(rows: Rows) -> np.ndarray:
    """Return the length of each row, (n,) float64."""
    return np.concatenate(
        [np.linalg.norm(block.astype(np.float64), axis=1) for block in rows.blocks()]
    )


class ClosePair(NamedTuple):
    """Two classes and the cosine of their weights."""

    one: int
    other: int
    cosine: float


def closest_pairs(rows: Rows, count: int, classes: np.ndarray | None = None) -> list[ClosePair]:
    """Find the pairs of classes with the highest cosines, block by block.

    Parameters
    ----------
    rows : Rows
        The class weights.
    count : int
        How many pairs to return, the closest first.
    classes : (n,) int64, optional
        Those to compare; by default all.
    """
    classes = np.arange(len(rows)) if classes is None else classes
    starts = range(0, len(classes), COMPARED_AT_ONCE)
    places = [(a, b) for a in starts for b in starts if a <= b]
    best: list[ClosePair] = []
    blocks = zip(places, inner_products(_unit_blocks(rows, classes, places)))
    for (a, b), cosines in progress(blocks, len(places), "comparing", "blocks"):
        if a == b:
            cosines[np.tril_indices(len(cosines))] = -2  # each pair once, and no class with itself
        flat = cosines.ravel()
        top = np.argpartition(flat, -min(count, flat.size))[-min(count, flat.size) :]
        best += [
            ClosePair(int(classes[a + row]), int(classes[b + column]), float(flat[place]))
            for place, row, column in zip(top, *np.unravel_index(top, cosines.shape))
            if flat[place] >= -1.5
        ]
        best = sorted(best, key=lambda pair: -pair.cosine)[:count]
    return best


def _unit_blocks(
    rows: Rows, classes: np.ndarray, places: list[tuple[int, int]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the normalized weights of two blocks of classes for each place."""
    left, left_at = None, -1
    for a, b in places:
        if a != left_at:
            left, left_at = normalized(rows.take(classes[a : a + COMPARED_AT_ONCE])), a
        yield left, normalized(rows.take(classes[b : b + COMPARED_AT_ONCE]))
