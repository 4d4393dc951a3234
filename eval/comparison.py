"""Compare faces: cosines of all pairs, and what a calibration says of a cosine.

A calibration is the file that ``eval/verification.py --calibrate 1e-2,1e-3 --json results.json``
writes: thresholds for false accept rates, and the curve between them.
"""

from __future__ import annotations

import json
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from dsoftmax.eval.models import ModelName
from dsoftmax.eval.plots import COLOURS
from dsoftmax.eval.sheets import GREY, Tile, draw_sheet

ROUNDING = 1e-3  # by which the cosine of float32 vectors may be beyond 1
SAME, DIFFERENT = "one person", "two people"
GROUNDS = {None: GREY, True: "#a9d3ec", False: "#f4c9a8"}  # is it one person; printed in grey, too
BORDERS = {None: "", True: COLOURS[0], False: COLOURS[1]}


class Threshold(NamedTuple):
    """The cosine above which two faces are taken for one person."""

    cosine: float
    far: float | None = None  # the share of pairs of different people above it, if it is known

    def __str__(self) -> str:
        rate = f", false accept rate {self.far:g}" if self.far is not None else ""
        return f"threshold {self.cosine:.4f}{rate}"


class Calibration(NamedTuple):
    """What verification has measured of a model."""

    target: str  # what it was measured on
    pairs: int  # of different people
    rates: list[tuple[float, float]]  # (cosine, false accept rate above it), by cosine
    thresholds: list[Threshold]  # that were asked for, the strictest first
    best: float  # the threshold with the highest accuracy

    def false_accept_rate(self, cosine: float) -> float:
        """Return the share of pairs of different people that have this cosine, or a higher one.

        It is read from points of a curve: the share is at most the result, and nearly as high. 0
        says that none of the pairs is so alike, no more.
        """
        return min((far for above, far in self.rates if above < cosine), default=1.0)

    def threshold(self, far: float | None = None) -> Threshold:
        """Return the threshold for a false accept rate.

        By default for the lowest that the pairs can show, or else that of the highest accuracy.
        """
        if far is None:
            able = [one for one in self.thresholds if one.far * self.pairs >= 1]
            return able[0] if able else Threshold(self.best)
        for one in self.thresholds:
            if abs(one.far - far) <= 1e-9 * far:
                return one
        there = ", ".join(f"{one.far:g}" for one in self.thresholds) or "none"
        raise ValueError(
            f"--far {far:g}: the calibration has thresholds for {there}; run eval/verification.py "
            f"with --calibrate {far:g}"
        )


def read_calibration(path: str, model: ModelName) -> Calibration:
    """Read what verification has measured of a model; of several results, that with most pairs."""
    try:
        with open(path, encoding="utf-8") as file:
            results = json.load(file)["results"]
        own = [result for result in results if _is_of(result, model)]
        if own:
            return max((_calibration(result) for result in own), key=lambda one: one.pairs)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError(
            f"{path}: not a file that eval/verification.py wrote with --calibrate and --json"
        ) from None
    others = ", ".join(sorted({str(result.get("model")) for result in results})) or "nothing"
    raise ValueError(
        f"{path} is a calibration of {others}, not of {model}: thresholds of one model say nothing "
        "about another"
    )


def _is_of(result: Mapping[str, Any], model: ModelName) -> bool:
    return result["digest"] == model.digest() if "digest" in result else False


def _calibration(result: Mapping[str, Any]) -> Calibration:
    asked = [
        Threshold(_number(one["cosine"]), _number(one["far"]))
        for one in result.get("calibration", [])
        if one["cosine"] is not None
    ]
    pairs = int(result["pairs"]) - int(result["same"])
    rates = [(one.cosine, one.far) for one in asked if one.far * pairs >= 1]
    if "highest_impostor" in result:
        rates.append((_number(result["highest_impostor"]), 0.0))
    curve = result.get("roc", {"far": [], "threshold": []})
    rates += [
        (-np.inf if cosine is None else _number(cosine), _number(far))
        for cosine, far in zip(curve["threshold"], curve["far"])
    ]
    return Calibration(
        target=str(result["target"]),
        pairs=pairs,
        rates=sorted(rates),
        thresholds=sorted(asked, key=lambda one: one.far),
        best=_number(result["cosine_threshold"]),
    )


def _number(value: Any) -> float:
    """Return a number of a calibration: a cosine or a rate, so neither is beyond 1."""
    number = float(value)
    if not abs(number) <= 1 + ROUNDING:
        raise ValueError(f"{number} is neither a cosine nor a rate")
    return number


class Pair(NamedTuple):
    """Two of the images, and what is said of them."""

    first: int
    second: int
    cosine: float
    is_same: bool | None  # None without a threshold
    false_accept_rate: float | None  # None without a calibration

    @property
    def verdict(self) -> str:
        """Whether they show one person, in words; empty without a threshold."""
        return {None: "", True: SAME, False: DIFFERENT}[self.is_same]


def compare(
    embeddings: np.ndarray,
    threshold: Threshold | None = None,
    calibration: Calibration | None = None,
) -> list[Pair]:
    """Compare all pairs of images, each once.

    Parameters
    ----------
    embeddings : (n, D)
        Of length 1.
    threshold : Threshold, optional
    calibration : Calibration, optional
    """
    cosines = embeddings.astype(float) @ embeddings.T.astype(float)
    pairs = []
    for first, second in zip(*np.triu_indices(len(embeddings), 1)):
        cosine = float(cosines[first, second])
        is_same = cosine > threshold.cosine if threshold else None
        rate = calibration.false_accept_rate(cosine) if calibration else None
        pairs.append(Pair(int(first), int(second), cosine, is_same, rate))
    return pairs


def rate_line(pair: Pair, calibration: Calibration) -> str:
    """Say how many pairs of different people are as alike as this one."""
    rate = pair.false_accept_rate
    share = f"at most {100 * rate:.3g} %" if 0 < rate < 1 else "all" if rate else "none"
    return (
        f"{share} of the {calibration.pairs} pairs of different people in {calibration.target} are "
        "as alike"
    )


def matrix_lines(names: Sequence[str], pairs: Sequence[Pair]) -> list[str]:
    """Lay out the cosines of all pairs; a star, with its meaning, for each of one person."""
    count = len(names)
    cells = [[""] * count for _ in names]
    for pair in pairs:
        text = f"{pair.cosine:.3f}{'*' if pair.is_same else ' '}"
        cells[pair.first][pair.second] = cells[pair.second][pair.first] = text
    wide = max(len(name) for name in names)
    head = " " * (wide + 4) + "".join(f"{f'({number})':>8}" for number in range(1, count + 1))
    return [
        head,
        *(
            f"({number}) {name:{wide}}" + "".join(f"{cell:>8}" for cell in row)
            for number, (name, row) in enumerate(zip(names, cells), 1)
        ),
        *([f"* {SAME}"] if any(pair.is_same for pair in pairs) else []),
    ]


def draw_comparison(
    faces: Sequence[np.ndarray],
    names: Sequence[str],
    pairs: Sequence[Pair],
    title: Sequence[str] = (),
) -> np.ndarray:
    """Draw two faces and their cosine, or the matrix of all pairs of faces.

    Returns
    -------
    (height, width, 3) uint8
        In RGB.
    """
    tiles = [Tile(face, [name]) for face, name in zip(faces, names)]
    if len(faces) == 2:
        (pair,) = pairs
        return draw_sheet([[tile._replace(border=BORDERS[pair.is_same]) for tile in tiles]], title)
    cells: dict[tuple[int, int], Tile] = {}
    for pair in pairs:
        word = f"{pair.cosine:.3f}\n{pair.verdict}".rstrip()
        cell = Tile(word=word, ground=GROUNDS[pair.is_same])
        cells[pair.first, pair.second] = cells[pair.second, pair.first] = cell
    body = [
        [tile, *(cells.get((row, column), Tile()) for column in range(len(tiles)))]
        for row, tile in enumerate(tiles)
    ]
    return draw_sheet([[Tile(), *tiles], *body], title)
