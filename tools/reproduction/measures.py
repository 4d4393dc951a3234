"""Figures of merit of embeddings of people who were not trained on."""

from __future__ import annotations

import numpy as np

from dsoftmax.eval import metrics

FARS = (1e-1, 1e-2, 1e-3, 1e-4)
FOLDS = 10
THRESHOLDS = np.linspace(-1, 1, 801)  # of cosines
PROBES_AT_ONCE = 512


def tar_name(far: float) -> str:
    """Return the name of the true accept rate at a false accept rate."""
    return f"tar@{far:.0e}".replace("e-0", "e-")


NAMES = ("accuracy", *map(tar_name, FARS), "rank1")
"""What `measure` returns, all from 0 to 1, more is better."""


def measure(embeddings: np.ndarray, people: np.ndarray, distractors: np.ndarray) -> dict:
    """Compare all images with all others, and search for people among distractors.

    Parameters
    ----------
    embeddings : (n, D)
    people : (n,) int
        Whom each image shows; the images of a person are neighbours.
    distractors : (m, D)
        Of other people.

    Returns
    -------
    dict of str to float
        ``accuracy`` over ten folds of people, on as many pairs of one person as of two, with the
        threshold of the other nine folds; true accept rates over all pairs; and ``rank1``, the
        share of the pairs of one person in which the second image is nearer to the first than all
        distractors and all images of other people are.
    """
    embeddings, distractors = (metrics.normalized(array) for array in (embeddings, distractors))
    genuine, impostor = [], []
    fold_of = _folds(people)
    right, pairs = np.zeros((2, FOLDS, len(THRESHOLDS))), np.zeros((2, FOLDS))
    hits = searches = 0
    for start in range(0, len(embeddings), PROBES_AT_ONCE):
        block = slice(start, start + PROBES_AT_ONCE)
        scores = embeddings[block] @ embeddings.T
        is_same = people[block, None] == people[None, :]
        rows = np.arange(len(scores))
        is_itself = np.zeros_like(is_same)
        is_itself[rows, start + rows] = True
        # The best of all who are not the person, for each probe.
        best = np.where(is_same, -1, scores).max(axis=1)
        best = np.maximum(best, (embeddings[block] @ distractors.T).max(axis=1, initial=-1))
        is_mate = is_same & ~is_itself
        hits += np.count_nonzero((scores > best[:, None]) & is_mate)
        searches += np.count_nonzero(is_mate)
        # Every pair once.
        is_later = np.arange(len(embeddings))[None, :] > (start + rows)[:, None]
        genuine.append(scores[is_mate & is_later])
        impostor.append(scores[~is_same & is_later])
        for fold in range(FOLDS):
            in_fold = (fold_of[block, None] == fold) & (fold_of[None, :] == fold) & is_later
            for kind, of_kind in enumerate((is_same, ~is_same)):
                values = np.sort(scores[in_fold & of_kind])
                below = np.searchsorted(values, THRESHOLDS, side="right")
                right[kind, fold] += below if kind else len(values) - below
                pairs[kind, fold] += len(values)
    genuine, impostor = np.concatenate(genuine), np.concatenate(impostor)
    points = metrics.at_far(genuine, impostor, FARS)
    return {
        "accuracy": _fold_accuracy(right, pairs),
        **{tar_name(far): point.tar for far, point in zip(FARS, points)},
        "rank1": hits / searches,
    }


def _folds(people: np.ndarray) -> np.ndarray:
    """Return the fold of each image, (n,): neighbouring people are in one fold."""
    _, number = np.unique(people, return_inverse=True)
    return number * FOLDS // (number.max() + 1)


def _fold_accuracy(right: np.ndarray, pairs: np.ndarray) -> float:
    """Return the mean accuracy over folds, in which both kinds of pairs count the same.

    Parameters
    ----------
    right : (2, folds, thresholds)
        Pairs that each threshold judges rightly, of one person and of two.
    pairs : (2, folds)
    """
    accuracies = []
    for fold in range(FOLDS):
        others = np.arange(FOLDS) != fold
        of_others = (right[:, others].sum(axis=1) / pairs[:, others].sum(axis=1)[:, None]).mean(0)
        best = int(np.argmax(of_others))
        accuracies.append(np.mean(right[:, fold, best] / pairs[:, fold]))
    return float(np.mean(accuracies))
