"""Datasets cut by identity: people to train on, to choose settings with, and to test on."""

from __future__ import annotations

import os

import numpy as np

from dsoftmax.recognition.data.images import load_rgb
from dsoftmax.recognition.data.records import Records, RecordWriter

PARTS = TRAIN, VALIDATION, TEST = ("train", "validation", "test")


def split(source: str, output: str, held_out: int) -> None:
    """Write three datasets of different people: the last ones are held out.

    Parameters
    ----------
    source : str
        A dataset.
    output : str
        Folder for one folder per part.
    held_out : int
        People in ``validation``, and as many in ``test``; the others are in ``train``. The labels
        of each begin at 0.
    """
    records = Records(source)
    order = np.argsort(records.labels, kind="stable")
    people, counts = np.unique(records.labels, return_counts=True)
    if len(people) < 4 * held_out:
        raise ValueError(
            f"{records.path} has {len(people)} identities: too few to hold out twice {held_out}"
        )
    images_of = np.split(order, np.cumsum(counts)[:-1])
    borders = (len(people) - 2 * held_out, len(people) - held_out)
    for part, start, stop in zip(PARTS, (0, *borders), (*borders, len(people))):
        with RecordWriter(os.path.join(output, part), records.image_size, overwrite=True) as writer:
            for label, images in enumerate(images_of[start:stop]):
                for image in images:
                    writer.add(label, records.read(int(image))[1].tobytes())


def load_images(folder: str, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the images of a dataset, (n, 3, height, width) uint8 in RGB, and labels, (n,)."""
    records = Records(folder)
    images = [load_rgb(records.read(number)[1], size) for number in range(len(records))]
    return np.stack(images).transpose(0, 3, 1, 2), records.labels
