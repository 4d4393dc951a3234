"""Find faces in photographs, by a detector that the user has: an ONNX file of SCRFD or YuNet.

SCRFD is insightface's (``det_10g.onnx`` of its pack buffalo_l, for instance) and runs in ONNX
Runtime; YuNet is OpenCV's (``face_detection_yunet_2023mar.onnx``), which runs it. What a file is,
the outputs of its graph say, not its name. Another detector is one module with a `Detector` and one
line in `DETECTORS`.
"""

from __future__ import annotations

import argparse
import os

from dsoftmax.recognition.data.detection.base import (
    CHOICES,
    Detection,
    Detector,
    DetectorError,
    FaceFinder,
)
from dsoftmax.recognition.data.detection.graph import read_outputs
from dsoftmax.recognition.data.detection.scrfd import Scrfd
from dsoftmax.recognition.data.detection.yunet import YuNet

__all__ = [
    "CHOICES",
    "Detection",
    "Detector",
    "DetectorError",
    "FaceFinder",
    "add_detector_flags",
    "open_detector",
    "open_finder",
]

DETECTORS = (YuNet, Scrfd)


def open_detector(path: str, min_score: float | None = None) -> Detector:
    """Open a detector of faces.

    Parameters
    ----------
    path : str
        An ONNX file.
    min_score : float, optional
        The least score of a face, 0 to 1; by default the detector's own.

    Returns
    -------
    Detector
        Its `detect` may be called by several threads at a time.

    Raises
    ------
    DetectorError
        If the file is no detector of faces and their five landmarks.
    ImportError
        If the library that runs it is missing.

    Examples
    --------
    >>> detector = open_detector("det_10g.onnx")  # doctest: +SKIP
    >>> [face.score for face in detector.detect(load_rgb("two.jpg"))]  # doctest: +SKIP
    [0.88, 0.81]
    """
    if min_score is not None and not 0 < min_score < 1:
        raise ValueError(f"the least score of a face is between 0 and 1, not {min_score}")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"detector {path}: there is no such file")
    outputs = read_outputs(path)
    for kind in DETECTORS:
        if kind.has_outputs(outputs):
            return kind(path, min_score or kind.MIN_SCORE)
    raise DetectorError(
        f"{path} is no detector of faces with five landmarks: it has {_describe(outputs)}, SCRFD "
        "has 9 outputs (scores, boxes and keypoints at three strides), YuNet 12 (cls_8 to kps_32). "
        "Take det_10g.onnx or det_500m.onnx of insightface's packs, or OpenCV's "
        "face_detection_yunet_2023mar.onnx"
    )


def _describe(outputs: list[str]) -> str:
    shown = ", ".join(outputs[:6]) + (", ..." if len(outputs) > 6 else "")
    return f"{len(outputs)} output{'s' * (len(outputs) != 1)} ({shown})"


def open_finder(path: str | None, choice: str = CHOICES[0]) -> FaceFinder | None:
    """Open the detector that a user has named; None if there is none."""
    return FaceFinder(open_detector(path), choice) if path else None


def add_detector_flags(
    parser: argparse.ArgumentParser, required: bool = False
) -> argparse._ArgumentGroup:
    """Add ``--detector`` and ``--face``; return their group."""
    photographs = parser.add_argument_group("photographs")
    photographs.add_argument(
        "--detector",
        required=required,
        metavar="FILE",
        help="finds faces and their landmarks: SCRFD of insightface's packs, or YuNet (.onnx)",
    )
    photographs.add_argument(
        "--face",
        choices=CHOICES,
        default=CHOICES[0],
        help="which of several: whom a photograph is of is mostly the largest; datasets that were "
        "cut around a face, as LFW, have it in the middle",
    )
    return photographs
