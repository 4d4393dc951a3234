"""SCRFD, insightface's detector, in ONNX Runtime.

The image is scaled to fit into the upper left of the input. Three grids have a cell every 8, 16 and
32 pixels, and two anchors per cell. An anchor has a score, the distances from the cell's
corner to the sides of the box, and the landmarks relative to that corner; lengths are in strides.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np

from dsoftmax.recognition.common.onnx_files import check_external_data
from dsoftmax.recognition.common.preflight import opencv
from dsoftmax.recognition.data.detection.base import Candidates, Detector, DetectorError

STRIDES = (8, 16, 32)
ANCHORS = 2  # per cell
WIDTHS = (1, 4, 10)  # numbers per anchor: score, box, landmarks
MEAN, DEVIATION = 127.5, 128.0  # of pixels
ONNX_ERRORS = 3  # ONNX Runtime's number for messages of errors and worse, without warnings


class Grid(NamedTuple):
    """The outputs of one stride; n is the number of anchors."""

    stride: int
    scores: np.ndarray  # (n,)
    distances: np.ndarray  # (n, 4)
    offsets: np.ndarray  # (n, 5, 2)


class Scrfd(Detector):
    """SCRFD with keypoints, of any size: 500m, 2.5g, 10g and so on."""

    MIN_SCORE = 0.5
    # insightface's. A face that fills a photograph is found at the coarse scale alone: of 25 that
    # were cut to their boxes, the fine one found none.
    sizes = ((640, 640), (128, 128))

    def __init__(self, path: str, min_score: float):
        super().__init__(path, min_score)
        try:
            import onnx
            import onnxruntime
        except ImportError as error:
            raise ImportError(
                f"{path} is SCRFD, which needs the extra onnx: pip install 'dsoftmax[onnx]' "
                f"({error})"
            ) from None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = ONNX_ERRORS
        options.intra_op_num_threads = 1  # several photographs at a time are faster
        try:
            check_external_data(onnx.load(path, load_external_data=False), path)
            self._session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # of onnxruntime's own many kinds
            raise DetectorError(f"{path}: ONNX Runtime can't load it: {error}") from None
        self._input = self._session.get_inputs()[0]
        fixed = tuple(self._input.shape[2:])
        if all(isinstance(side, int) for side in fixed):
            self.sizes = (fixed,)
        self._order = self._find_order()

    @staticmethod
    def has_outputs(names: Sequence[str]) -> bool:
        """Say whether a graph could be SCRFD: with keypoints, it has 9 outputs, without 6."""
        return len(names) in (len(STRIDES) * 3, len(STRIDES) * 2)

    def _find_order(self) -> list[tuple[int, int, int]]:
        """Find out which outputs are scores, boxes and landmarks of each stride, by their shapes.

        Files don't agree on names or declared shapes, so the smallest input is tried.
        """
        height, width = self.sizes[-1]
        try:
            outputs = self._run(np.zeros((height, width, 3), np.uint8))
        except Exception as error:  # of onnxruntime's own many kinds
            raise DetectorError(f"{self.path}: it takes no image as SCRFD does: {error}") from None
        shapes = [output.shape[-2:] for output in outputs]

        def place(stride: int, numbers: int) -> int:
            anchors = (height // stride) * (width // stride) * ANCHORS
            return shapes.index((anchors, numbers))

        try:
            order = [tuple(place(stride, numbers) for numbers in WIDTHS[:2]) for stride in STRIDES]
        except ValueError:
            found = ", ".join(map(str, shapes))
            raise DetectorError(
                f"{self.path} is not SCRFD, whose outputs have 1, 4 and 10 numbers for each of two "
                f"anchors at the strides 8, 16 and 32: for an image of {height}x{width} its "
                f"outputs are {found}"
            ) from None
        try:
            return [(*pair, place(stride, WIDTHS[2])) for stride, pair in zip(STRIDES, order)]
        except ValueError:
            raise DetectorError(
                f"{self.path} is SCRFD without keypoints, and faces can't be aligned without five "
                "landmarks: take one of insightface's packs (det_10g.onnx, det_500m.onnx) or one "
                "whose name has kps in it"
            ) from None

    def _run(self, rgb: np.ndarray) -> list[np.ndarray]:
        pixels = (rgb.astype(np.float32) - MEAN) / DEVIATION
        return self._session.run(None, {self._input.name: pixels.transpose(2, 0, 1)[None]})

    def find(self, rgb: np.ndarray, size: tuple[int, int]) -> Candidates:
        """Find faces at one of the `sizes`; a face may be there several times."""
        canvas, scale = letterbox(rgb, size)
        outputs = self._run(canvas)
        grids = []
        for stride, places in zip(STRIDES, self._order):
            scores, distances, offsets = (outputs[place] for place in places)
            grids.append(
                Grid(stride, scores.ravel(), distances.reshape(-1, 4), offsets.reshape(-1, 5, 2))
            )
        boxes, scores, landmarks = decode(grids, size[1], self.min_score)
        return Candidates(boxes / np.tile(scale, 2), scores, landmarks / scale)


def letterbox(image: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Scale an image to fit into the upper left of a black one, as insightface does.

    Parameters
    ----------
    image : (rows, columns, 3) uint8
    size : (int, int)
        Height and width of the result.

    Returns
    -------
    canvas : (height, width, 3) uint8
    scale : (2,)
        By how much x and y were scaled. Whole pixels make them differ; insightface takes that of y
        for both, which moves the points of a photograph of 1500×1000 by up to 2 pixels.
    """
    height, width = size
    rows, columns = image.shape[:2]
    if rows * width > height * columns:
        fitted = max(int(height * columns / rows), 1), height
    else:
        fitted = width, max(int(width * rows / columns), 1)
    canvas = np.zeros((height, width, 3), np.uint8)
    canvas[: fitted[1], : fitted[0]] = opencv().resize(image, fitted)
    return canvas, np.array(fitted) / (columns, rows)


def decode(grids: Sequence[Grid], width: int, min_score: float) -> Candidates:
    """Turn a network's outputs into boxes and landmarks, in pixels of its input.

    Parameters
    ----------
    grids : sequence of Grid
    width : int
        Of the network's input.
    min_score : float

    Returns
    -------
    Candidates
    """
    found = []
    for stride, scores, distances, offsets in grids:
        good = np.flatnonzero(scores >= min_score)
        rows, columns = np.divmod(good // ANCHORS, width // stride)
        corners = np.stack([columns, rows], axis=1)
        boxes = np.hstack([corners - distances[good, :2], corners + distances[good, 2:]])
        found.append((boxes * stride, scores[good], (corners[:, None] + offsets[good]) * stride))
    return Candidates(*(np.concatenate(parts) for parts in zip(*found)))
