"""Show the pairs that verification gets wrong, as a picture."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from dsoftmax.eval.pairs import USUAL_FARS, Verification
from dsoftmax.recognition.common.preflight import opencv
from dsoftmax.recognition.data.images import fit
from dsoftmax.recognition.data.packs import Pack

WORST_SHOWN = 20  # of each kind of mistake
MOST_LETTERS = 21  # of a file's name below its image


def worst_mistakes(result: Verification, most: int = WORST_SHOWN) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs on the wrong side of the threshold, the worst first.

    Parameters
    ----------
    result : Verification
    most : int
        The largest number of pairs to return of each kind.

    Returns
    -------
    refused : (n,) int
        Numbers of the pairs of one person with the lowest cosines.
    accepted : (m,) int
        Numbers of the pairs of two people with the highest cosines.
    """
    order = np.argsort(result.cosines, kind="stable")
    wrong = (result.cosines > result.threshold) != result.issame
    refused = [pair for pair in order if wrong[pair] and result.issame[pair]]
    accepted = [pair for pair in order[::-1] if wrong[pair] and not result.issame[pair]]
    return np.array(refused[:most], int), np.array(accepted[:most], int)


def mistakes_json(result: Verification, most: int = WORST_SHOWN) -> dict[str, list[dict]]:
    """Return the numbers and cosines of the worst mistakes, as JSON can hold them."""
    return {
        kind: [{"pair": int(pair), "cosine": float(result.cosines[pair])} for pair in pairs]
        for kind, pairs in zip(("refused", "accepted"), worst_mistakes(result, most))
    }


def detailed_json(result: Verification) -> dict[str, Any]:
    """Return all that a page shows of a result: figures, thresholds and the worst mistakes."""
    entry = {**result.as_json(), "mistakes": mistakes_json(result)}
    if result.impostor.size:
        entry.update(result.thresholds_json(result.calibrate(USUAL_FARS)))
    return entry


def contact_sheet(pack: Pack, result: Verification, columns: int = 5) -> np.ndarray:
    """Lay out the worst mistakes, each as two images with the pair's number and cosine.

    Images that were read from files have their names below them.

    Parameters
    ----------
    pack : Pack
        The pack that `result` belongs to.
    result : Verification
    columns : int
        The largest number of pairs per row.

    Returns
    -------
    (height, width, 3) uint8
        Blue, green, red.
    """
    cv2 = opencv()
    side, line, gap = 112, 16, 6
    caption = line * (2 if pack.paths else 1) + 2

    def blank(height: int, width: int) -> np.ndarray:
        return np.full((height, width, 3), 255, np.uint8)

    def write(image: np.ndarray, text: str, x: int, y: int, scale: float = 0.4) -> None:
        cv2.putText(image, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, scale, 0, 1, cv2.LINE_AA)

    def tile(pair: int) -> np.ndarray:
        image = blank(side + caption + gap, 2 * side + 2 * gap)
        for place in (0, 1):
            face = fit(pack.decode(2 * pair + place)[:, :, ::-1], side, side)
            image[:side, place * side : (place + 1) * side] = face
            if pack.paths:
                name = _short_path(pack.paths[2 * pair + place])
                write(image, name, place * side + 2, side + line - 5, 0.28)
        write(image, f"pair {pair}: {result.cosines[pair]:+.3f}", 2, side + caption - 5)
        return image

    mistakes = worst_mistakes(result)
    columns = max(min(columns, max(map(len, mistakes))), 3)  # three are as wide as a heading
    width = columns * tile(0).shape[1]
    sections = []
    for pairs, kind in zip(mistakes, ("taken for two people", "taken for one person")):
        heading = blank(30, width)
        count = "the worst" if len(pairs) else "none"
        write(
            heading, f"{result.name}: {count} {kind}, threshold {result.threshold:+.3f}", 4, 20, 0.5
        )
        sections.append(heading)
        for start in range(0, len(pairs), columns):
            row = np.hstack([tile(pair) for pair in pairs[start : start + columns]])
            sections.append(np.hstack([row, blank(len(row), width - row.shape[1])]))
    return np.vstack(sections)


def _short_path(path: str) -> str:
    """Return the end of a path, folder and file, in letters that OpenCV can write."""
    name = os.path.join(*os.path.normpath(path).split(os.sep)[-2:])
    if len(name) > MOST_LETTERS:
        name = ".." + name[2 - MOST_LETTERS :]
    return name.encode("ascii", "replace").decode()
