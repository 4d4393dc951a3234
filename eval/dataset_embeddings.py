"""Embed all images of a dataset, once: the result is kept on disk."""

from __future__ import annotations

import hashlib
import os
import sys

import numpy as np

from dsoftmax.eval.feature_cache import cached_features
from dsoftmax.eval.models import Model, load_model, parse_models, say_where
from dsoftmax.recognition.common.cli import some_of
from dsoftmax.recognition.common.devices import usable_contexts
from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.recognition.common.vectors import normalized
from dsoftmax.recognition.data.images import ImageError, load_rgb
from dsoftmax.recognition.data.recordio import RecordError
from dsoftmax.recognition.data.records import Records

ROWS_PER_BLOCK = 65536


def embed_dataset(
    records: Records, model: str, folder: str, batch_size: int = 32, threads: int = 2
) -> np.ndarray:
    """Return the embedding of each image of a dataset, the sum with that of its mirror image.

    An interrupted call is continued by the next one. Images that can't be read are named on stderr.

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
    (name, *others) = parse_models(model)
    if others:
        raise ValueError(f"--model {model}: one network at a time, as prefix,epoch or file.onnx")
    size = name.trained_size() or records.image_size

    def load(image: int) -> np.ndarray:
        try:
            return load_rgb(records.read(image)[1], size)
        except RecordError as error:
            raise ImageError(str(error)) from None

    def load_network() -> Model:
        contexts = usable_contexts()
        network = load_model(name, contexts)
        say_where(name, contexts, size)
        return network

    content = os.stat(records.path)
    described = {
        "model": name.digest(),
        "images": hashlib.sha256(records.offsets.tobytes()).hexdigest(),
        "bytes": content.st_size,
        "changed": content.st_mtime_ns,
    }
    title = os.path.basename(os.path.dirname(os.path.abspath(records.path)))
    features = cached_features(
        folder, title, described, len(records), load_network, load, size, batch_size, threads
    )
    if features.unreadable:
        lines = some_of([f"image {image}: {why}" for image, why in features.unreadable])
        print(f"{len(features.unreadable)} images can't be read:\n{lines}", file=sys.stderr)
    path = os.path.join(os.path.dirname(features.views.filename), "embeddings.npy")
    if not os.path.exists(path) or os.path.getmtime(path) < os.path.getmtime(
        features.views.filename
    ):
        _add_up(features.views, path)
    return np.load(path, mmap_mode="r")


def _add_up(views: np.ndarray, path: str) -> None:
    """Write the normalized sums of two views each, block by block."""
    count, _, width = views.shape
    with AtomicFile(path) as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, count, ROWS_PER_BLOCK):
            file.write(normalized(views[start : start + ROWS_PER_BLOCK].sum(axis=1)).tobytes())
