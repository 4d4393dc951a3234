"""What all detectors share: faces at several scales, each face once, and the choice of one."""

from __future__ import annotations

import abc
import hashlib
from typing import Any, ClassVar, NamedTuple, Sequence

import numpy as np

from dsoftmax.recognition.data.images import NoFaceError

MOST_OVERLAP = 0.4  # of two faces, as the share of their union; insightface's
CHOICES = ("largest", "central")


class DetectorError(ValueError):
    """The file is no detector that can be used here."""


class Detection(NamedTuple):
    """A face in a photograph; lengths are pixels of the photograph, to the right and down."""

    box: np.ndarray  # (4,): left, top, right, bottom
    score: float  # 0 to 1
    landmarks: np.ndarray  # (5, 2): eyes, nose tip, mouth corners; the left of the picture first


class Candidates(NamedTuple):
    """What a detector returns at one scale, in pixels of the photograph."""

    boxes: np.ndarray  # (n, 4)
    scores: np.ndarray  # (n,)
    landmarks: np.ndarray  # (n, 5, 2)


class Detector(abc.ABC):
    """Finds faces and their five landmarks.

    Parameters
    ----------
    path : str
        The detector's file.
    min_score : float
        The least score of a face.

    Attributes
    ----------
    sizes : sequence of (int, int)
        Heights and widths that a photograph is scaled to; faces of all of them count.
    """

    MIN_SCORE: ClassVar[float]
    sizes: Sequence[tuple[int, int]]

    def __init__(self, path: str, min_score: float):
        self.path = path
        self.min_score = min_score

    @staticmethod
    @abc.abstractmethod
    def has_outputs(names: Sequence[str]) -> bool:
        """Say whether a graph with these outputs is such a detector."""

    @abc.abstractmethod
    def find(self, rgb: np.ndarray, size: tuple[int, int]) -> Candidates:
        """Find faces at one of the `sizes`; a face may be there several times."""

    def detect(self, rgb: np.ndarray) -> list[Detection]:
        """Find the faces of a photograph.

        Parameters
        ----------
        rgb : (height, width, 3) uint8
            Red, green, blue.

        Returns
        -------
        list of Detection
            By their scores, the highest first.
        """
        found = [self.find(rgb, size) for size in self.sizes]
        boxes, scores, landmarks = (np.concatenate(parts) for parts in zip(*found))
        return [
            Detection(boxes[face], float(scores[face]), landmarks[face])
            for face in suppress(boxes, scores)
        ]


def suppress(boxes: np.ndarray, scores: np.ndarray, most: float = MOST_OVERLAP) -> list[int]:
    """Keep the best of the boxes that overlap: non-maximum suppression.

    Parameters
    ----------
    boxes : (n, 4)
        Left, top, right, bottom; of pixels, so that a box of one pixel has equal sides.
    scores : (n,)
    most : float
        The largest intersection over union of two boxes that are both kept.

    Returns
    -------
    list of int
        The boxes to keep, by their scores.
    """
    low, high = boxes[:, :2], boxes[:, 2:] + 1
    areas = (high - low).prod(axis=1)
    kept = []
    order = np.argsort(-scores, kind="stable")
    while len(order):
        best, order = order[0], order[1:]
        kept.append(int(best))
        sides = np.minimum(high[best], high[order]) - np.maximum(low[best], low[order])
        shared = sides.clip(0).prod(axis=1)
        order = order[shared <= most * (areas[best] + areas[order] - shared)]
    return kept


class FaceFinder:
    """Finds the one face of a photograph that is meant; called, it returns its landmarks.

    Parameters
    ----------
    detector : Detector
    choice : {"largest", "central"}
        Of several faces, which one: the largest box, since whom a photograph is of stands nearest;
        or the one in the middle, for datasets that were cut around a face, as LFW.
    """

    def __init__(self, detector: Detector, choice: str = CHOICES[0]):
        if choice not in CHOICES:
            raise ValueError(f"the face to take is one of {', '.join(CHOICES)}, not {choice!r}")
        self.detector = detector
        self.choice = choice

    def settings(self) -> dict[str, Any]:
        """Return everything that the landmarks of an image depend on, as JSON can hold it."""
        with open(self.detector.path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        return {"detector": digest, "min_score": self.detector.min_score, "face": self.choice}

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """Return the landmarks of the face that is meant, (5, 2); see `find`."""
        return self.find(image)[0].landmarks

    def find(self, image: np.ndarray) -> tuple[Detection, int]:
        """Return the face that is meant, and how many there are.

        Parameters
        ----------
        image : (height, width, 3) uint8
            Blue, green, red, as `decode` returns it.

        Raises
        ------
        NoFaceError
            If there is none.
        """
        faces = self.detector.detect(np.ascontiguousarray(image[:, :, ::-1]))
        if not faces:
            raise NoFaceError(f"no face with a score of {self.detector.min_score:g} or more")
        boxes = np.stack([face.box for face in faces])
        if self.choice == "largest":
            rank = -(boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
        else:
            middle = np.array(image.shape[1::-1]) / 2
            rank = np.linalg.norm((boxes[:, :2] + boxes[:, 2:]) / 2 - middle, axis=1)
        return faces[int(np.argmin(rank))], len(faces)
