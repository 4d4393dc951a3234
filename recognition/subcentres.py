"""What several centres per class tell about a dataset: which of its images are noise.

Trained with ``subcentres``, the clean images of a class gather at one of its centres, hard and
wrong ones at the others (Deng et al., *Sub-center ArcFace*, 2020).
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import numpy as np

from dsoftmax.eval import metrics
from dsoftmax.eval.embed import embed_batches
from dsoftmax.eval.models import Embed
from dsoftmax.recognition.common.arrays import map_npy
from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.identities import write_table
from dsoftmax.recognition.data.images import load_rgb
from dsoftmax.recognition.data.records import Records, RecordWriter

CLASSES, DROPPED = "classes.npy", "dropped.csv"


class Choice(NamedTuple):
    """The main centre of each class, and the images that belong to it."""

    dominant: np.ndarray  # (K,) int64
    is_kept: np.ndarray  # (n,) bool
    angles: np.ndarray  # (n,) degrees to the main centre; NaN for an image that can't be read


def read_centres(path: str, num_classes: int) -> np.ndarray:
    """Return the centres of a saved state's classes, (K, centres, D), from its ``classes.npy``."""
    weights = map_npy(path)
    if weights.ndim != 2 or len(weights) % num_classes or len(weights) == num_classes:
        raise ValueError(
            f"{path}: {weights.shape} class weights are not several centres for each of the "
            f"{num_classes} classes of the dataset: train on it with --loss-option subcentres=3"
        )
    return weights.reshape(num_classes, -1, weights.shape[1])


def compare(
    embed: Embed, records: Records, centres: np.ndarray, batch_size: int, threads: int = 2
) -> np.ndarray:
    """Return the cosines of all images with the centres of their own class, (n, centres).

    Those of an image that can't be read are NaN.
    """
    size, labels = records.image_size, records.labels
    cosines = np.full((len(records), centres.shape[1]), np.nan, np.float32)

    def load(image: int) -> np.ndarray:
        return load_rgb(records.read(image)[1], size)

    for batch in embed_batches(embed, load, range(len(records)), batch_size, threads):
        if not batch.views.shape[2]:
            continue
        embeddings = metrics.normalized(batch.views.sum(axis=1))
        images = slice(batch.start, batch.start + len(embeddings))
        own = centres[labels[images]]
        own = own / np.maximum(np.linalg.norm(own, axis=2, keepdims=True), 1e-10)
        cosines[images] = np.einsum("nd,njd->nj", embeddings, own)
        unreadable = [image for image, _ in batch.unreadable]
        cosines[unreadable] = np.nan
    return cosines


def choose(cosines: np.ndarray, labels: np.ndarray, num_classes: int, angle: float) -> Choice:
    """Find the main centre of each class, and drop the images that are far from it.

    Parameters
    ----------
    cosines : (n, centres)
        Of each image with the centres of its class.
    labels : (n,) int64
    num_classes : int
    angle : float
        In degrees: images beyond it are dropped.
    """
    is_read = ~np.isnan(cosines[:, 0])
    counts = np.zeros((num_classes, cosines.shape[1]), np.int64)
    np.add.at(counts, (labels[is_read], cosines[is_read].argmax(axis=1)), 1)
    dominant = counts.argmax(axis=1)
    to_dominant = cosines[np.arange(len(labels)), dominant[labels]]
    angles = np.degrees(np.arccos(np.clip(to_dominant, -1, 1)))
    return Choice(dominant, angles <= angle, angles)


def write_clean(
    records: Records, centres: np.ndarray, choice: Choice, output: str, overwrite: bool = False
) -> dict[str, int]:
    """Write the kept images, the main centres of their classes and a list of the dropped images.

    Classes without an image are left out, and the others numbered anew.

    Returns
    -------
    dict
        The numbers of ``identities``, ``images``, ``dropped`` images and ``left_out`` identities.
    """
    kept = np.flatnonzero(choice.is_kept)
    if not len(kept):
        raise ValueError("no image is near the main centre of its class: nothing would be left")
    labels = records.labels
    old_labels, new_labels = np.unique(labels[kept], return_inverse=True)
    order = np.argsort(new_labels, kind="stable")
    with RecordWriter(output, records.image_size, overwrite) as writer:
        writer.names = {
            new: records.names[old] for new, old in enumerate(old_labels) if old in records.names
        }
        for place in progress(order, desc="writing", unit="images"):
            writer.add(int(new_labels[place]), records.read(int(kept[place]))[1].tobytes())
    with AtomicFile(os.path.join(output, CLASSES)) as file:
        np.save(file, centres[old_labels, choice.dominant[old_labels]])
    dropped = np.flatnonzero(~choice.is_kept)
    rows = [
        (image, labels[image], "unreadable" if math.isnan(found) else f"{found:.1f}")
        for image, found in zip(dropped, choice.angles[dropped])
    ]
    write_table(os.path.join(output, DROPPED), ("image", "label", "degrees"), rows)
    return {
        "identities": len(old_labels),
        "images": len(kept),
        "dropped": len(dropped),
        "left_out": len(choice.dominant) - len(old_labels),
    }
