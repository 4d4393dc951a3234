"""The mean embedding of each class's images, as its first weights."""

from __future__ import annotations

import numpy as np

from dsoftmax.eval import metrics
from dsoftmax.eval.embed import embed_batches
from dsoftmax.eval.models import Embed
from dsoftmax.recognition.data.images import load_rgb
from dsoftmax.recognition.data.pipeline import Pipeline
from dsoftmax.recognition.data.records import Records
from dsoftmax.recognition.trained import Trained


def class_means(
    trained: Trained, pipeline: Pipeline, batch_size: int, threads: int = 2
) -> np.ndarray:
    """Embed all images once and average them by class.

    The new weights have the directions of the means and the lengths of the random weights, so that
    learning rate and weight decay act as on those. Classes without images keep their weights, and
    so do all centres of a class but its first.

    Returns
    -------
    (K, D) float32
        Or (K × centres, D).
    """
    numbers, labels = pipeline.images_and_classes()
    all_weights = trained.head.class_weights()
    weights = all_weights[:: trained.head.store.subcentres]  # the first centre of each class
    directions = mean_directions(
        trained.backbone.embed,
        pipeline.records,
        numbers,
        labels,
        np.zeros_like(weights),
        pipeline.image_size,
        batch_size,
        threads,
    )
    seen = directions.any(axis=1)
    lengths = np.linalg.norm(weights[seen], axis=1, keepdims=True)
    weights[seen] = directions[seen] * lengths
    return all_weights


def mean_directions(
    embed: Embed,
    records: Records,
    images: np.ndarray,
    rows: np.ndarray,
    sums: np.ndarray,
    image_size: tuple[int, int],
    batch_size: int,
    threads: int = 2,
) -> np.ndarray:
    """Average the normalized embeddings, mirror images included, of groups of images.

    Parameters
    ----------
    embed : callable
    records : Records
    images : (n,) int
        The numbers of the images in the records.
    rows : (n,) int
        The group of each image.
    sums : (groups, D) float32
        Zeros; their memory is used.
    image_size : (int, int)
        Height and width that the network takes.
    batch_size, threads : int

    Returns
    -------
    (groups, D) float32
        Of length 1; zeros for groups of which no image could be read.
    """

    def load(place: int) -> np.ndarray:
        _, encoded = records.read(int(images[place]))
        return load_rgb(encoded, image_size)

    for batch in embed_batches(
        embed, load, range(len(images)), batch_size, threads, desc="class means"
    ):
        if batch.views.shape[2]:
            embeddings = metrics.normalized(batch.views.sum(axis=1))
            if embeddings.shape[1] != sums.shape[1]:
                raise ValueError(
                    f"the embeddings are of width {embeddings.shape[1]}, the class weights of "
                    f"width {sums.shape[1]}: take the network that they were trained with"
                )
            np.add.at(sums, rows[batch.start : batch.start + len(embeddings)], embeddings)
    return metrics.normalized(sums)
