"""IJB's templates: faces of one person in several media, pooled into one feature; and their files.

Features of faces are pooled as in insightface's protocol: image and mirror image are summed (F),
the length of the embedding is kept as a sign of quality (N) and multiplied by the detector's score
(D); then the faces of a medium (the frames of a video) are averaged, and then the media.
"""

from __future__ import annotations

import csv
import warnings
from typing import NamedTuple

import numpy as np

from dsoftmax.recognition.common.files import open_text
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress

ROWS_PER_BLOCK = 8192
PAIRS_PER_BLOCK = 1024  # small enough for the caches of the processor
FAILED = -1.0  # the score of a pair with a template that has no readable face: the lowest


class Faces(NamedTuple):
    """The face images of a set."""

    names: list[str]
    landmarks: np.ndarray  # (n, 5, 2) float32
    scores: np.ndarray  # (n,) float32, the detector's


class Members(NamedTuple):
    """Which face belongs to which template, and from which medium."""

    faces: np.ndarray  # (m,) int, rows of `Faces`
    templates: np.ndarray  # (m,) int, their ids
    media: np.ndarray  # (m,) int


class Pairs(NamedTuple):
    """Templates to compare."""

    first: np.ndarray  # (p,) int32, ids
    second: np.ndarray  # (p,) int32
    issame: np.ndarray  # (p,) bool
    path: str = "the list of pairs"  # that they come from


class Templates(NamedTuple):
    """Templates and their features."""

    ids: np.ndarray  # (t,) int, ascending
    features: np.ndarray  # (t, D) float32, of length 1; 0 where there is no readable face

    def rows(self, ids: np.ndarray, where: str) -> np.ndarray:
        """Return the rows of templates; refuse unknown ones, naming `where` they come from."""
        rows = np.searchsorted(self.ids, ids)
        known = self.ids[np.minimum(rows, len(self.ids) - 1)] == ids
        if not known.all():
            raise ValueError(
                f"{where}: template {ids[~known][0]} has no face in the list of templates"
            )
        return rows

    @property
    def is_empty(self) -> np.ndarray:
        """Which templates have no readable face, (t,) bool."""
        return ~self.features.any(axis=1)


def read_faces(path: str) -> Faces:
    """Read lines ``name x1 y1 … x5 y5 score``."""
    names, numbers = [], []
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            name, *rest = line.split()
            try:
                values = np.array(rest, np.float32)
            except ValueError:
                values = np.zeros(0)
            if values.shape != (11,) or not np.isfinite(values).all():
                raise ValueError(
                    f"{path}: line {number} is not `name x1 y1 x2 y2 x3 y3 x4 y4 x5 y5 score`: "
                    f"{line.strip()!r}"
                )
            names.append(name)
            numbers.append(values)
    if not names:
        raise ValueError(f"{path}: the file is empty")
    table = np.stack(numbers)
    return Faces(names, table[:, :10].reshape(-1, 5, 2), table[:, 10])


def read_members(path: str, names: list[str]) -> Members:
    """Read lines ``name template medium``, the names among `names`."""
    row_of = {name: row for row, name in enumerate(names)}
    table = []
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            try:
                name, template, medium = line.split()
                table.append((row_of[name], np.int64(template), np.int64(medium)))
            except KeyError:
                raise ValueError(
                    f"{path}: line {number}: {name!r} is not in the list of landmarks"
                ) from None
            except (ValueError, OverflowError):
                raise ValueError(
                    f"{path}: line {number} is not `name template medium`: {line.strip()!r}"
                ) from None
    if not table:
        raise ValueError(f"{path}: the file is empty")
    return Members(*np.array(table, np.int64).T)


def read_pairs(path: str) -> Pairs:
    """Read lines ``template template 1|0``, of which IJB-C has 15.6 million."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        try:
            # numpy parses a file of numbers ten times as fast as Python does its lines.
            numbers = np.fromfile(path, np.int32, sep=" ")
        except DeprecationWarning:
            numbers = np.zeros(1, np.int32)
    if not numbers.size or numbers.size % 3 or not np.isin(numbers[2::3], (0, 1)).all():
        raise ValueError(f"{path}: its lines are not `template template 1` or `… 0`")
    table = numbers.reshape(-1, 3)
    return Pairs(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].astype(bool), path)


def read_people(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Read a csv of templates and the people they show: a heading, then template id, subject id, ….

    Returns
    -------
    templates, subjects : (n,) int
        Each template once.
    """
    people: dict[int, int] = {}
    with open_text(path, newline="") as file:
        for number, row in enumerate(csv.reader(file), 1):
            if not row:
                continue
            try:
                template, subject = (int(np.int64(float(text))) for text in row[:2])
            except (ValueError, OverflowError):
                if number == 1:
                    continue
                raise ValueError(
                    f"{path}: line {number} is not `template,subject,…`: {','.join(row)!r}"
                ) from None
            if people.setdefault(template, subject) != subject:
                raise ValueError(
                    f"{path}: line {number}: template {template} shows {subject}, but "
                    f"{people[template]} in an earlier line"
                )
    if not people:
        raise ValueError(f"{path}: the file holds no template")
    return np.array(list(people), np.int64), np.array(list(people.values()), np.int64)


def face_features(
    views: np.ndarray,
    scores: np.ndarray,
    flip: bool = True,
    norm: bool = True,
    detector: bool = True,
) -> np.ndarray:
    """Return the features of faces from those of the image and its mirror image.

    Parameters
    ----------
    views : (n, 2, D) or (n, 1, D)
    scores : (n,)
        The detector's.
    flip, norm, detector : bool
        The switches F, N and D: sum the two, keep the length, multiply by the score.

    Returns
    -------
    (n, D) float32
    """
    features = views.sum(axis=1) if flip else np.array(views[:, 0])
    if not norm:
        lengths = np.linalg.norm(features, axis=1, keepdims=True)
        features = features / np.where(lengths > 0, lengths, 1)
    if detector:
        features = features * scores[:, None]
    return features.astype(np.float32, copy=False)


def pool(
    views: np.ndarray,
    scores: np.ndarray,
    members: Members,
    flip: bool = True,
    norm: bool = True,
    detector: bool = True,
) -> Templates:
    """Pool faces into templates: the mean over the media of the means over their faces.

    Parameters
    ----------
    views : (n, 2, D) or (n, 1, D)
        May be mapped from disk: it is read block by block. A face of zeros could not be read and
        is ignored.
    scores : (n,)
    members : Members
    flip, norm, detector : bool
        See `face_features`.
    """
    order = np.argsort(members.templates, kind="stable")
    faces, media = members.faces[order], members.media[order]
    ids, rows = np.unique(members.templates[order], return_inverse=True)
    is_there = np.concatenate(
        [
            views[start : start + ROWS_PER_BLOCK].any(axis=(1, 2))
            for start in range(0, len(views), ROWS_PER_BLOCK)
        ]
    )[faces]
    # The mean over a medium is a weight for each of its faces, so media need no memory.
    _, medium_of = np.unique(np.stack([rows, media]), axis=1, return_inverse=True)
    medium_of = medium_of.ravel()
    weights = is_there / np.maximum(np.bincount(medium_of, is_there), 1)[medium_of]
    pooled = np.zeros((len(ids), views.shape[2]), np.float32)
    for start in range(0, len(faces), ROWS_PER_BLOCK):
        block = slice(start, start + ROWS_PER_BLOCK)
        in_block = faces[block]
        features = face_features(views[in_block], scores[in_block], flip, norm, detector)
        bad = np.flatnonzero(~np.isfinite(features).all(axis=1))
        if bad.size:
            raise ValueError(
                f"the feature of face {in_block[bad[0]]} holds NaN or infinite numbers"
            )
        features *= weights[block, None].astype(np.float32)
        present, first_row = np.unique(rows[block], return_index=True)
        # A template may continue in the next block, hence the sum of sums.
        pooled[present] += np.add.reduceat(features, first_row)
    lengths = np.linalg.norm(pooled, axis=1, keepdims=True)
    return Templates(ids, pooled / np.where(lengths > 0, lengths, 1))


def pair_scores(templates: Templates, pairs: Pairs, threads: int = 2) -> np.ndarray:
    """Return the cosines of pairs of templates, (p,) float32, computed block by block.

    A pair with a template that has no readable face gets the lowest score, -1: a system that finds
    no face accepts nobody.
    """
    is_empty = templates.is_empty

    def score(start: int) -> np.ndarray:
        block = slice(start, start + PAIRS_PER_BLOCK)
        first, second = (
            templates.rows(ids[block], pairs.path) for ids in (pairs.first, pairs.second)
        )
        cosines = np.einsum(
            "pd,pd->p", templates.features[first], templates.features[second], dtype=np.float32
        )
        cosines[is_empty[first] | is_empty[second]] = FAILED
        return cosines

    scores = np.empty(len(pairs.issame), np.float32)
    starts = range(0, len(scores), PAIRS_PER_BLOCK)
    with progress(total=len(scores), desc="comparing", unit="pairs") as bar:
        for start, cosines in zip(starts, map_ordered(score, starts, threads)):
            scores[start : start + len(cosines)] = cosines
            bar.update(len(cosines))
    return scores
