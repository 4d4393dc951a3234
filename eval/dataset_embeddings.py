"""Embed all images of a dataset, once: the result is kept on disk."""

from __future__ import annotations

import hashlib
import os
import sys

import numpy as np

from dsoftmax.eval.embedding_files import Job, embed_to_file
from dsoftmax.eval.models import load_model, say_where, single_model
from dsoftmax.recognition.common.cli import some_of
from dsoftmax.recognition.common.devices import usable_contexts
from dsoftmax.recognition.data.inputs import dataset_images
from dsoftmax.recognition.data.records import Records


def embed_dataset(
    records: Records, model: str, folder: str, batch_size: int = 32, threads: int = 2
) -> np.ndarray:
    """Return the embedding of each image of a dataset, the sum with that of its mirror image.

    An interrupted call is continued by the next one. Images that can't be read are named on stderr
    by the call that embeds them, and in the ``.csv`` beside the embeddings.

    Parameters
    ----------
    records : Records
    model : str
        ``prefix,epoch`` or ``file.onnx``.
    folder : str
        For the embeddings of all networks and datasets, each in its own folder.
    batch_size, threads : int

    Returns
    -------
    (n, D) float32
        In the order of the dataset, of length 1, mapped from disk; 0 for an unreadable image.
    """
    name = single_model(model)
    size = name.trained_size() or records.image_size
    images = dataset_images(records)
    title = os.path.basename(os.path.dirname(os.path.abspath(records.path)))
    described = f"{name.digest()} {images.digest()} {size}"
    digest = hashlib.sha256(described.encode()).hexdigest()[:12]
    path = os.path.join(folder, f"{title}-{digest}", "embeddings.npy")
    if not os.path.exists(path):
        contexts = usable_contexts()
        job = Job(load_model(name, contexts), images, size, flip=True, normalize=True)
        say_where(name, contexts, size)
        done = embed_to_file(job, path, batch_size, threads)
        if done.unreadable:
            lines = some_of([f"image {image}: {why}" for image, why in done.unreadable])
            print(f"{len(done.unreadable)} images can't be read:\n{lines}", file=sys.stderr)
    return np.load(path, mmap_mode="r")
