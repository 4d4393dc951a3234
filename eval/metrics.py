"""Rates that say how well embeddings distinguish people, computed from scores alone.

The more alike two faces are, the higher their score. `genuine` scores belong to pairs of one
person, `impostor` scores to pairs of two. A pair is accepted if its score is *above* the threshold,
so that all pairs that score exactly the threshold are refused.

Rates are exact: thresholds are scores that occur, not the nearest of a grid. The one exception is
`fold_accuracy`, whose grid is part of LFW's protocol as everybody runs it.
"""

from __future__ import annotations

import math
from typing import Iterator, NamedTuple, Sequence

import numpy as np

from dsoftmax.recognition.common.vectors import normalized as normalized

ACCURACY_THRESHOLDS = np.arange(0, 4, 0.01)  # of squared distances
PEOPLE_DRAWS = 2000


def squared_distances(embeddings: np.ndarray) -> np.ndarray:
    """Return the squared distances (P,) of pairs of embeddings (2P, D): a0, b0, a1, b1, …."""
    return np.square(embeddings[0::2] - embeddings[1::2]).sum(axis=1)


class FoldAccuracy(NamedTuple):
    """Accuracy by cross-validation."""

    mean: float
    deviation: float  # over the folds, of the population
    accuracies: np.ndarray  # (folds,)
    thresholds: np.ndarray  # (folds,), of squared distances, each the best of the other folds


def fold_accuracy(distances: np.ndarray, is_same: np.ndarray, folds: int = 10) -> FoldAccuracy:
    """Return the accuracy on pairs by cross-validation in file order, as insightface's.

    In each fold the threshold is the first of the best on all other folds; a pair counts as one
    person if its distance is below it.

    Parameters
    ----------
    distances : (P,)
        Squared.
    is_same : (P,) bool
    folds : int
        2 or more; with fewer pairs than folds, every pair is a fold.
    """
    distances, is_same = _checked(distances, is_same)
    folds = min(folds, len(distances))
    if folds < 2:
        raise ValueError("cross-validation takes at least two pairs and two folds")
    is_right = (distances[:, None] < ACCURACY_THRESHOLDS) == is_same[:, None]
    accuracies, thresholds = [], []
    for others, fold in _split_into_folds(len(distances), folds):
        best = int(np.argmax(np.count_nonzero(is_right[others], axis=0)))
        accuracies.append(np.mean(is_right[fold, best]))
        thresholds.append(ACCURACY_THRESHOLDS[best])
    mean, deviation = float(np.mean(accuracies)), float(np.std(accuracies))
    return FoldAccuracy(mean, deviation, np.array(accuracies), np.array(thresholds))


def fold_rates(
    distances: np.ndarray, is_same: np.ndarray, folds: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """Return true and false accept rates at the thresholds of `fold_accuracy`.

    Parameters
    ----------
    distances, is_same, folds
        As of `fold_accuracy`.

    Returns
    -------
    tar, far : (thresholds,)
        The means over the folds; a fold without pairs of a kind counts as 0 for that kind.
    """
    distances, is_same = _checked(distances, is_same)
    is_accepted = distances[:, None] < ACCURACY_THRESHOLDS
    rates = []
    for _, fold in _split_into_folds(len(distances), min(folds, len(distances))):
        of_kinds = (is_accepted[fold][is_same[fold] == kind] for kind in (True, False))
        rates.append([kind.sum(axis=0) / max(len(kind), 1) for kind in of_kinds])
    tar, far = np.mean(rates, axis=0)
    return tar, far


def _split_into_folds(count: int, folds: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the places of the other folds and of the fold itself, for each fold in file order."""
    from sklearn.model_selection import KFold  # takes half a second to import

    return KFold(folds).split(np.empty(count))


def _checked(values: np.ndarray, is_same: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, is_same = np.asarray(values), np.asarray(is_same, bool)
    if values.shape != is_same.shape or values.ndim != 1:
        raise ValueError(f"{values.shape} values do not belong to {is_same.shape} pairs")
    _refuse_nan(values)
    return values, is_same


def _refuse_nan(scores: np.ndarray) -> None:
    bad = np.count_nonzero(~np.isfinite(scores))
    if bad:
        raise ValueError(f"{bad} of {scores.size} scores are NaN or infinite")


class OperatingPoint(NamedTuple):
    """A threshold and the rates that result from it."""

    threshold: float
    tar: float  # share of the genuine pairs that are accepted; NaN if there are none
    far: float  # share of the impostor pairs that are accepted


def at_far(
    genuine: np.ndarray, impostor: np.ndarray, fars: Sequence[float], total: int | None = None
) -> list[OperatingPoint]:
    """Return the lowest thresholds whose false accept rates are not above those asked for.

    Parameters
    ----------
    genuine : (g,)
    impostor : (i,)
        At least one. A rate below 1 / i accepts not a single one.
    fars : sequence of float
        In [0, 1].
    total : int, optional
        How many impostor pairs there are, if only the highest i of their scores are known; they
        must be more than the largest rate accepts.
    """
    genuine, impostor = np.asarray(genuine), np.asarray(impostor)
    if not impostor.size:
        raise ValueError("without pairs of different people there is no false accept rate")
    for scores in (genuine, impostor):
        _refuse_nan(scores)
    total = impostor.size if total is None else total
    # 1e-9: 0.1 of 10 pairs is one of them, whatever floating point makes of it.
    allowed = [min(math.floor(far * total + 1e-9), total) for far in fars]
    if impostor.size < total and max(allowed, default=0) >= impostor.size:
        raise ValueError(
            f"the highest {impostor.size} of {total} scores are too few for the rate {max(fars):g}"
        )
    # Only the highest scores matter; sorting all 15 million of IJB-C would take longer.
    start = max(impostor.size - max(allowed, default=0) - 1, 0)
    highest = np.sort(np.partition(impostor, start)[start:])
    genuine = np.sort(genuine)
    points = []
    for count in allowed:
        threshold = float(highest[-1 - count]) if count < highest.size else -math.inf
        accepted = highest.size - np.searchsorted(highest, threshold, side="right")
        right = genuine.size - np.searchsorted(genuine, threshold, side="right")
        tar = float(right / genuine.size) if genuine.size else math.nan
        points.append(OperatingPoint(threshold, tar, float(accepted / total)))
    return points


class Interval(NamedTuple):
    """Where a value lies with a given confidence."""

    low: float
    high: float


class Calibration(NamedTuple):
    """A threshold for a false accept rate, and how far it can be trusted."""

    far: float  # asked for
    point: OperatingPoint
    threshold: Interval  # holds the threshold whose rate is `far` among all impostors
    tar: Interval  # of the chosen threshold, among all pairs
    pairs_needed: int  # impostor pairs that can show this rate at all; trust it with ten times more


def calibrate(
    genuine: np.ndarray, impostor: np.ndarray, fars: Sequence[float], confidence: float = 0.95
) -> list[Calibration]:
    """Return thresholds for false accept rates with confidence intervals.

    The intervals are exact and assume nothing about the scores but that the pairs are independent:
    order statistics for thresholds, Clopper and Pearson's for rates. Pairs that share people are
    not independent: where the people are known, `widen_by_people` allows for that.

    Parameters
    ----------
    genuine, impostor, fars
        As of `at_far`.
    confidence : float
    """
    from scipy import stats

    calibrations = []
    descending = np.sort(impostor)[::-1]
    for far, point in zip(fars, at_far(genuine, impostor, fars)):
        # The number of impostors above the true threshold, with this confidence.
        fewest, most = (int(k) for k in stats.binom.interval(confidence, len(descending), far))
        threshold = Interval(
            float(descending[most]) if most < len(descending) else -math.inf,
            float(descending[fewest - 1]) if fewest > 0 else math.inf,
        )
        right = np.count_nonzero(np.asarray(genuine) > point.threshold)
        tar = share_interval(right, len(genuine), confidence)
        calibrations.append(Calibration(far, point, threshold, tar, math.ceil(1 / far - 1e-9)))
    return calibrations


def share_interval(hits: int, trials: int, confidence: float = 0.95) -> Interval:
    """Return Clopper and Pearson's interval of a share of which `hits` of `trials` were seen."""
    from scipy import stats

    if not trials:
        return Interval(0.0, 1.0)
    tail = (1 - confidence) / 2
    low = stats.beta.ppf(tail, hits, trials - hits + 1) if hits else 0.0
    high = stats.beta.ppf(1 - tail, hits + 1, trials - hits) if hits < trials else 1.0
    return Interval(float(low), float(high))


def redraw_people(people: np.ndarray, draws: int = PEOPLE_DRAWS) -> Iterator[np.ndarray]:
    """Draw people with replacement, again and again; yield how often each pair is then seen, (P,).

    Pairs that share a person stand or fall together; a pair of two people is seen as often as both
    were drawn, multiplied.

    Parameters
    ----------
    people : (P, 2)
        Whom the images of the pairs show.
    draws : int
    """
    names, places = np.unique(people, return_inverse=True)
    one, other = places.reshape(-1, 2).T
    rng = np.random.default_rng(0)
    for _ in range(draws):
        times = np.bincount(rng.integers(len(names), size=len(names)), minlength=len(names))
        yield np.where(one == other, times[one], times[one] * times[other])


def share_interval_by_people(
    is_hit: np.ndarray, people: np.ndarray, confidence: float = 0.95
) -> Interval:
    """Return the interval of the share of pairs that are hits, if other people had been asked.

    It is never narrower than that of independent pairs, `share_interval`: drawing people again
    can't show what no pair has shown.

    Parameters
    ----------
    is_hit : (P,) bool
    people : (P, 2)
    confidence : float
    """
    independent = share_interval(int(np.count_nonzero(is_hit)), len(is_hit), confidence)
    if not len(is_hit):
        return independent
    shares = [
        weights @ is_hit / weights.sum() for weights in redraw_people(people) if weights.any()
    ]
    return _hull(independent, shares, confidence)


def widen_by_people(
    calibrations: Sequence[Calibration],
    scores: np.ndarray,
    is_same: np.ndarray,
    people: np.ndarray,
    confidence: float = 0.95,
) -> list[Calibration]:
    """Widen the intervals of `calibrate` to what they are if people, not pairs, are independent.

    Parameters
    ----------
    calibrations : sequence of Calibration
        Of these pairs.
    scores : (P,)
    is_same : (P,) bool
    people : (P, 2)
    confidence : float
    """
    scores, is_same = _checked(scores, is_same)
    order = np.argsort(-scores[~is_same], kind="stable")
    descending = np.append(scores[~is_same][order], -math.inf)
    fars = np.array([one.far for one in calibrations])
    thresholds = []
    for weights in redraw_people(people[~is_same][order]):
        seen = np.cumsum(weights)
        if seen[-1]:  # as `at_far` does: the highest score that is not accepted
            allowed = np.floor(fars * seen[-1] + 1e-9)
            thresholds.append(descending[np.searchsorted(seen, allowed, side="right")])
    return [
        one._replace(
            threshold=_hull(one.threshold, drawn, confidence),
            tar=share_interval_by_people(
                scores[is_same] > one.point.threshold, people[is_same], confidence
            ),
        )
        for one, drawn in zip(calibrations, np.transpose(thresholds))
    ]


def _hull(interval: Interval, values: Sequence[float], confidence: float) -> Interval:
    """Widen an interval to hold the middle of some values, too."""
    values = np.sort(values)
    outside = int(len(values) * (1 - confidence) / 2)
    return Interval(
        min(interval.low, float(values[outside])), max(interval.high, float(values[-1 - outside]))
    )


class FoldRate(NamedTuple):
    """A true accept rate by cross-validation."""

    mean: float
    deviation: float
    far: float  # mean of the rates observed on the folds that the threshold was not chosen on


def fold_tar(scores: np.ndarray, is_same: np.ndarray, far: float, folds: int = 10) -> FoldRate:
    """Return the true accept rate at a false accept rate (VAL@FAR), by cross-validation.

    In each fold the threshold is that of the other folds' impostors. A fold without pairs of a kind
    does not count for the rate of that kind.

    Parameters
    ----------
    scores : (P,)
    is_same : (P,) bool
    far : float
    folds : int
    """
    scores, is_same = _checked(scores, is_same)
    folds = min(folds, len(scores))
    if folds < 2:
        raise ValueError("cross-validation takes at least two pairs and two folds")
    tars, fars = [], []
    for others, fold in _split_into_folds(len(scores), folds):
        impostor = scores[others][~is_same[others]]
        threshold = at_far(scores[:0], impostor, [far])[0].threshold if impostor.size else -math.inf
        accepted, same = scores[fold] > threshold, is_same[fold]
        if same.any():
            tars.append(np.mean(accepted[same]))
        if not same.all():
            fars.append(np.mean(accepted[~same]))
    if not tars:
        return FoldRate(math.nan, math.nan, float(np.mean(fars)))
    return FoldRate(
        float(np.mean(tars)), float(np.std(tars)), float(np.mean(fars)) if fars else math.nan
    )


class Roc(NamedTuple):
    """The rates at every threshold that makes a difference, from the highest to the lowest."""

    thresholds: np.ndarray  # (t,), the first infinite: nobody is accepted
    far: np.ndarray  # (t,)
    tar: np.ndarray  # (t,)

    @property
    def auc(self) -> float:
        """The area under the curve: the chance that a genuine pair scores higher."""
        from sklearn.metrics import auc

        return float(auc(self.far, self.tar))

    @property
    def eer(self) -> float:
        """The rate at which as many impostors are accepted as genuine pairs are refused."""
        gap = self.far - (1 - self.tar)  # grows along the curve, from -1 to 1
        after = int(np.argmax(gap >= 0))
        before = max(after - 1, 0)
        width = gap[after] - gap[before]
        share = -gap[before] / width if width > 0 else 0.0
        return float(self.far[before] + share * (self.far[after] - self.far[before]))


def roc(genuine: np.ndarray, impostor: np.ndarray) -> Roc:
    """Return the whole curve.

    Parameters
    ----------
    genuine, impostor : (g,), (i,)
        At least one each.
    """
    genuine, impostor = np.asarray(genuine), np.asarray(impostor)
    if not (genuine.size and impostor.size):
        raise ValueError("a curve takes pairs of the same and pairs of different people")
    for scores in (genuine, impostor):
        _refuse_nan(scores)
    genuine, impostor = np.sort(genuine), np.sort(impostor)
    steps = np.unique(np.concatenate([genuine, impostor]))[::-1]
    # Those at a score are accepted by the threshold just below it.
    accepted = [np.searchsorted(scores, steps, side="left") for scores in (genuine, impostor)]
    tar, far = (
        np.append(0, 1 - below / scores.size)
        for below, scores in zip(accepted, (genuine, impostor))
    )
    return Roc(np.append(np.inf, steps), far, tar)


class Identification(NamedTuple):
    """The ranks and scores of a gallery search."""

    ranks: np.ndarray  # (mated,) int64, 1 for the first place; ties count against the mate
    mate_scores: np.ndarray  # (mated,), the best of the mate's entries
    other_scores: np.ndarray  # (unmated,), the best score of probes that have no mate

    def rank_rate(self, rank: int) -> float:
        """Return the share of the mated probes whose mate is among the first so many (CMC)."""
        return float(np.mean(self.ranks <= rank)) if self.ranks.size else math.nan

    def cmc(self, most: int) -> np.ndarray:
        """Return `rank_rate` of 1, 2, … up to `most`, (most,)."""
        counts = np.bincount(np.minimum(self.ranks, most + 1), minlength=most + 2)
        return np.cumsum(counts[1 : most + 1]) / max(self.ranks.size, 1)

    def at_fpir(self, fpirs: Sequence[float]) -> list[OperatingPoint]:
        """Return the true positive identification rates at false positive ones.

        A search is right if the mate is first *and* above the threshold. The threshold is made on
        the probes that have no mate, whose best score must not be above it.
        """
        right = np.where(self.ranks == 1, self.mate_scores, -np.inf)
        points = []
        for point in at_far(self.mate_scores, self.other_scores, fpirs):
            rate = float(np.mean(right > point.threshold)) if right.size else math.nan
            points.append(point._replace(tar=rate))
        return points


def identify(scores: np.ndarray, probe_ids: np.ndarray, gallery_ids: np.ndarray) -> Identification:
    """Look up probes in a gallery.

    Parameters
    ----------
    scores : (probes, entries)
    probe_ids : (probes,)
        Whom each shows.
    gallery_ids : (entries,)
        A person may have several entries, of which the best counts.
    """
    _refuse_nan(scores)
    is_mate = np.asarray(probe_ids)[:, None] == np.asarray(gallery_ids)[None, :]
    mated = is_mate.any(axis=1)
    mate = np.where(is_mate, scores, -np.inf).max(axis=1, initial=-np.inf)
    others = np.where(is_mate, -np.inf, scores)
    ahead = np.count_nonzero(others[mated] >= mate[mated, None], axis=1)
    best = scores[~mated].max(axis=1, initial=-np.inf)
    return Identification(1 + ahead, mate[mated], best)
