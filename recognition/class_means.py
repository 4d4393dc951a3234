"""The mean embedding of each class's images, as its first weights."""

from __future__ import annotations

import numpy as np

from dsoftmax.eval import metrics
from dsoftmax.eval.embed import embed_batches
from dsoftmax.recognition.data.images import load_rgb
from dsoftmax.recognition.data.pipeline import Pipeline
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

    def load(place: int) -> np.ndarray:
        _, encoded = pipeline.records.read(int(numbers[place]))
        return load_rgb(encoded, pipeline.image_size)

    all_weights = trained.head.class_weights()
    weights = all_weights[:: trained.head.store.subcentres]
    sums = np.zeros_like(weights)
    for batch in embed_batches(
        trained.backbone.embed, load, range(len(numbers)), batch_size, threads, desc="class means"
    ):
        if batch.views.shape[2]:
            embeddings = metrics.normalized(batch.views.sum(axis=1))
            np.add.at(sums, labels[batch.start : batch.start + len(embeddings)], embeddings)
    seen = sums.any(axis=1)
    lengths = np.linalg.norm(weights[seen], axis=1, keepdims=True)
    weights[seen] = metrics.normalized(sums[seen]) * lengths
    return all_weights
