"""YuNet, OpenCV's detector, run by OpenCV itself."""

from __future__ import annotations

import threading
from typing import Sequence

import numpy as np

from dsoftmax.recognition.common.preflight import opencv
from dsoftmax.recognition.data.detection.base import (
    MOST_OVERLAP,
    Candidates,
    Detector,
    DetectorError,
)

OUTPUTS = {f"{kind}_{stride}" for kind in ("cls", "obj", "bbox", "kps") for stride in (8, 16, 32)}


class YuNet(Detector):
    """YuNet since its version of March 2023, which OpenCV runs since 4.8."""

    MIN_SCORE = 0.7
    sizes = ((640, 640),)  # also finds faces that fill a photograph; a coarse scale is less exact

    def __init__(self, path: str, min_score: float):
        super().__init__(path, min_score)
        self._of_thread = threading.local()  # OpenCV's detectors serve one thread each
        self.find(np.zeros((64, 64, 3), np.uint8), (64, 64))

    @staticmethod
    def has_outputs(names: Sequence[str]) -> bool:
        """Say whether a graph is YuNet."""
        return set(names) == OUTPUTS

    def _network(self):
        if not hasattr(self._of_thread, "network"):
            self._of_thread.network = opencv().FaceDetectorYN.create(
                self.path, "", (64, 64), self.min_score, MOST_OVERLAP
            )
        return self._of_thread.network

    def find(self, rgb: np.ndarray, size: tuple[int, int]) -> Candidates:
        """Find faces at one of the `sizes`; photographs are made smaller, never larger."""
        cv2 = opencv()
        rows, columns = rgb.shape[:2]
        factor = min(size[0] / rows, size[1] / columns, 1)
        fitted = max(round(columns * factor), 1), max(round(rows * factor), 1)
        image = cv2.resize(rgb, fitted, interpolation=cv2.INTER_AREA)
        try:
            network = self._network()
            network.setInputSize(fitted)
            found = network.detect(cv2.cvtColor(image, cv2.COLOR_RGB2BGR))[1]
        except (AttributeError, cv2.error) as error:
            raise DetectorError(
                f"OpenCV {cv2.__version__} can't run {self.path}, although it is YuNet: take "
                "face_detection_yunet_2023mar.onnx or a later one of OpenCV's, and OpenCV 4.8 or "
                f"newer: {str(error).strip().splitlines()[0]}"
            ) from None
        found = np.zeros((0, 15)) if found is None else found
        scale = np.array(fitted) / (columns, rows)
        boxes = np.hstack([found[:, :2], found[:, :2] + found[:, 2:4]])
        landmarks = found[:, 4:14].reshape(-1, 5, 2)
        return Candidates(boxes / np.tile(scale, 2), found[:, 14], landmarks / scale)
