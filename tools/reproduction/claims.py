"""The paper's claims, each decided by paired differences over seeds, never by the text."""

from __future__ import annotations

import math
from typing import Iterable, NamedTuple, Sequence

import numpy as np

CONFIDENCE = 0.95
POINT = 0.01
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided at this scale"
METRIC = "tar@1e-3"  # by which claims are decided: low rates separate losses best
ORTHOGONALITY = "orthogonality"


class Comparison(NamedTuple):
    """A statement about two cells: the first is better, or worse by less than a margin."""

    first: str
    second: str
    margin: float = 0.0  # 0 for "better"
    metric: str = METRIC


class Claim(NamedTuple):
    """A claim of the paper, and what it says about cells."""

    number: str
    text: str
    comparisons: tuple[Comparison, ...]


# Cells of `grid`; "k" has the main sampling rate of a setting, "k-more" four times as many
# negatives. The texts name both rates; in the paper they are 1/64 and 1/16.
CLAIMS = (
    Claim(
        "1",
        "D-Softmax with d = 0.9 is better than Softmax and comparable to ArcFace",
        (Comparison("d-0.9", "softmax"), Comparison("d-0.9", "arcface-best", POINT)),
    ),
    Claim(
        "1, tuned",
        "so is D-Softmax with the best d",
        (Comparison("d-best", "softmax"), Comparison("d-best", "arcface-best", POINT)),
    ),
    Claim(
        "2",
        "accuracy rises with d to about 0.9, then falls",
        (Comparison("d-0.9", "d-0.5"), Comparison("d-0.9", "d-1.0")),
    ),
    Claim(
        "3",
        "sampling {more} of the classes costs nearly nothing, {main} little",
        (Comparison("k-more", "d-best", POINT), Comparison("k", "d-best", 3 * POINT)),
    ),
    Claim(
        "4",
        "at the same rate D-Softmax-B is at least as good as D-Softmax-K",
        (Comparison("b-more", "k-more", POINT), Comparison("b", "k", POINT)),
    ),
    Claim(
        "5",
        "D-Softmax-K is better than Rand-Softmax, Rand-ArcFace and HF-Softmax at {main}",
        tuple(Comparison("k", other) for other in ("rand-softmax", "rand-arcface", "hf-softmax")),
    ),
    Claim(
        "5, with the batch's classes",
        "so is D-Softmax-K if the batch's other classes are negatives too, as with these",
        tuple(
            Comparison("k+batch", other) for other in ("rand-softmax", "rand-arcface", "hf-softmax")
        ),
    ),
    Claim(
        "6",
        "class weights stay as orthogonal as with Softmax if the inter part is sampled at {main}, "
        "and drift without it",
        (
            Comparison("k", "softmax", 0.02, ORTHOGONALITY),
            Comparison("softmax", "intra", 0.0, ORTHOGONALITY),
        ),
    ),
    Claim(
        "6, d = 0.9",
        "so they do with the paper's d",
        (
            Comparison("k-0.9", "softmax", 0.02, ORTHOGONALITY),
            Comparison("softmax", "intra-0.9", 0.0, ORTHOGONALITY),
        ),
    ),
    Claim(
        "8",
        "with D-Softmax's intra part, its own inter part is better than Softmax's and comparable "
        "to ArcFace's",
        (Comparison("d-best", "d+softmax"), Comparison("d-best", "d+arcface", POINT)),
    ),
)


class Difference(NamedTuple):
    """The mean of paired differences, and where it lies with a confidence of 95 %."""

    mean: float
    low: float
    high: float
    pairs: int


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return the mean of first - second with Student's interval.

    Parameters
    ----------
    first, second : (seeds,)
        Of the same seeds, in the same order.
    """
    from scipy import stats

    differences = np.subtract(first, second)
    count = len(differences)
    mean = float(differences.mean()) if count else math.nan
    if count < 2:
        return Difference(mean, -math.inf, math.inf, count)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * differences.std(ddof=1) / math.sqrt(count)
    return Difference(mean, mean - half, mean + half, count)


def judge(difference: Difference, margin: float = 0.0) -> str:
    """Say whether the first is better than the second, or worse by less than a margin."""
    if difference.low > -margin:
        return HOLDS
    return FAILS if difference.high < -margin else UNDECIDED


def judge_all(verdicts: Iterable[str]) -> str:
    """Return the verdict on a claim: it holds if all of its comparisons do."""
    verdicts = list(verdicts)
    if FAILS in verdicts:
        return FAILS
    return UNDECIDED if UNDECIDED in verdicts or not verdicts else HOLDS
