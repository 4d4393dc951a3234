"""Show whom a class stands for: its name and some of its images."""

from __future__ import annotations

import functools

import numpy as np

from dsoftmax.eval.result_page import thumbnail
from dsoftmax.recognition.data.images import ImageError, load_rgb
from dsoftmax.recognition.data.pipeline import Pipeline

IMAGES_SHOWN = 2  # per class


class ClassImages:
    """Names and pictures of classes, as far as the dataset has them.

    Parameters
    ----------
    pipeline : Pipeline or None
        None if the dataset is not at hand.
    """

    def __init__(self, pipeline: Pipeline | None):
        self._pipeline = pipeline

    @functools.cached_property
    def _images_and_classes(self) -> tuple[np.ndarray, np.ndarray]:
        return self._pipeline.images_and_classes()

    def _images_of(self, number: int) -> np.ndarray:
        if self._pipeline is None:
            return np.empty(0, int)
        images, classes = self._images_and_classes
        return images[np.flatnonzero(classes == number)[:IMAGES_SHOWN]]

    def pictures(self, number: int) -> list[bytes]:
        """Return small JPEGs of the first images of a class."""
        made = []
        for image in self._images_of(number):
            try:
                made.append(thumbnail(load_rgb(self._pipeline.records.read(int(image))[1])))
            except ImageError:
                continue  # training skips it, too
        return made

    def name(self, number: int) -> str:
        """Return a class's number, and its name if the dataset has one."""
        images = self._images_of(number)
        if not len(images):
            return f"class {number}"
        records = self._pipeline.records
        name = records.names.get(int(records.labels[images[0]]))
        return f"{name} (class {number})" if name else f"class {number}"
