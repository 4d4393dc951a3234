"""Embeddings on disk, so that an interrupted run resumes where it stopped.

A cache is a folder whose name depends on everything that determines its content (the model, the
list of images, their size), so that models never share embeddings. It holds ``features.npy``,
(images, 2, D) float32, and ``state.json``: how many rows are written, and which images could not be
read.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Callable, Mapping, NamedTuple

import numpy as np

from dsoftmax.eval.embed import embed_batches
from dsoftmax.eval.growing_array import GrowingArray
from dsoftmax.eval.models import Embed
from dsoftmax.recognition.data.images import ImageError


class Features(NamedTuple):
    """Embeddings of all images of a list."""

    views: np.ndarray  # (n, 2, D) float32, mapped from disk: the image's, its mirror image's
    unreadable: list[tuple[int, str]]  # (number of the image, why); its rows are 0


def cached_features(
    folder: str,
    name: str,
    depends_on: Mapping[str, Any],
    count: int,
    make_embed: Callable[[], Embed],
    load: Callable[[int], np.ndarray],
    size: tuple[int, int],
    batch_size: int = 32,
    threads: int = 2,
) -> Features:
    """Return the embeddings of images; compute only those that the cache lacks.

    Parameters
    ----------
    folder : str
        Holds all caches.
    name : str
        Beginning of the name of the cache's folder.
    depends_on : mapping
        Everything that the embeddings depend on, as JSON can hold it.
    count : int
        The number of images.
    make_embed : callable
        Loads the model; not called if the cache is complete.
    load : callable
        Returns an image by its number; see `embed_batches`.
    size : (int, int)
        Height and width of the images that `load` returns.
    batch_size, threads : int
    """
    described = json.dumps({**depends_on, "count": count, "size": list(size)}, sort_keys=True)
    digest = hashlib.sha256(described.encode()).hexdigest()[:12]
    cache = os.path.join(folder, f"{name}-{digest}")
    os.makedirs(cache, exist_ok=True)
    rows = GrowingArray(
        os.path.join(cache, "features.npy"), os.path.join(cache, "state.json"), count
    )
    if rows.done < count:
        embed = make_embed()
        width = embed(np.zeros((1, 3, *size), np.uint8)).shape[1]
        rows.open((2, width))
        try:
            for batch in embed_batches(
                embed, load, range(rows.done, count), batch_size, threads, desc=name
            ):
                views = batch.views
                if not views.size:  # none of them could be read
                    views = np.zeros((len(views), 2, width))
                rows.append(views, unreadable=batch.unreadable)
        finally:
            rows.close()
    elif rows.notes["unreadable"]:
        _try_again(rows, make_embed, load)
    unreadable = [(number, why) for number, why in rows.notes["unreadable"]]
    return Features(np.load(rows.path, mmap_mode="r"), unreadable)


def _try_again(rows: GrowingArray, make_embed: Callable[[], Embed], load: Callable) -> None:
    """Embed the images that could not be read in an earlier run and can be read now."""

    def can_be_read(number: int) -> bool:
        try:
            load(number)
        except (ImageError, OSError):
            return False
        return True

    readable = [number for number, _ in rows.notes["unreadable"] if can_be_read(number)]
    if readable:
        embed = make_embed()
        for number in readable:
            for batch in embed_batches(embed, load, range(number, number + 1), 1):
                rows.notes["unreadable"] = [
                    entry for entry in rows.notes["unreadable"] if entry[0] != number
                ]
                rows.replace(number, batch.views[0])
