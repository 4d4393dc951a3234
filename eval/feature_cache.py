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
import time
from typing import Any, Callable, Mapping, NamedTuple

import numpy as np

from dsoftmax.eval.embed import embed_batches
from dsoftmax.eval.models import Embed
from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.recognition.data.images import ImageError

SECONDS_BETWEEN_SAVES = 20.0


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
    writer = _Writer(cache, count)
    if writer.done < count:
        embed = make_embed()
        writer.open(embed(np.zeros((1, 3, *size), np.uint8)).shape[1])
        try:
            for batch in embed_batches(
                embed, load, range(writer.done, count), batch_size, threads, desc=name
            ):
                writer.append(batch.views, batch.unreadable)
        finally:
            writer.close()
    elif writer.unreadable:
        _try_again(writer, make_embed, load)
    return Features(np.load(writer.features_path, mmap_mode="r"), writer.unreadable)


def _try_again(writer: _Writer, make_embed: Callable[[], Embed], load: Callable) -> None:
    """Embed the images that could not be read in an earlier run and can be read now."""

    def can_be_read(number: int) -> bool:
        try:
            load(number)
        except (ImageError, OSError):
            return False
        return True

    readable = [number for number, _ in writer.unreadable if can_be_read(number)]
    if readable:
        embed = make_embed()
        for number in readable:
            for batch in embed_batches(embed, load, range(number, number + 1), 1):
                writer.replace(number, batch.views)


class _Writer:
    """Appends rows; the state on disk never claims more rows than were written."""

    def __init__(self, folder: str, count: int):
        self.features_path = os.path.join(folder, "features.npy")
        self._state_path = os.path.join(folder, "state.json")
        self._count = count
        self.done, self.unreadable, self._width = 0, [], 0
        if os.path.exists(self._state_path) and os.path.exists(self.features_path):
            with open(self._state_path, encoding="utf-8") as file:
                state = json.load(file)
            self.done, self._width = state["done"], state["width"]
            self.unreadable = [(number, why) for number, why in state["unreadable"]]

    def open(self, width: int) -> None:
        if width != self._width:
            self.done, self.unreadable, self._width = 0, [], width
        header = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)),
            "fortran_order": False,
            "shape": (self._count, 2, width),
        }
        self._file = open(self.features_path, "r+b" if self.done else "wb")  # noqa: SIM115
        np.lib.format.write_array_header_1_0(self._file, header)
        self._file.seek(self.done * 2 * width * 4, os.SEEK_CUR)
        self._saved_at = time.monotonic()

    def append(self, views: np.ndarray, unreadable: list[tuple[int, str]]) -> None:
        if not views.shape[2]:  # none of them could be read
            views = np.zeros((len(views), 2, self._width), np.float32)
        self._file.write(views.tobytes())
        self.done += len(views)
        self.unreadable += unreadable
        if time.monotonic() - self._saved_at > SECONDS_BETWEEN_SAVES:
            self._save()

    def replace(self, number: int, views: np.ndarray) -> None:
        """Write the rows of an image that could not be read before."""
        features = np.load(self.features_path, mmap_mode="r+")
        features[number] = views[0]
        features.flush()
        self.unreadable = [entry for entry in self.unreadable if entry[0] != number]
        self._save_state()

    def _save(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._save_state()
        self._saved_at = time.monotonic()

    def _save_state(self) -> None:
        state = {"done": self.done, "width": self._width, "unreadable": self.unreadable}
        with AtomicFile(self._state_path, "w") as file:
            json.dump(state, file)

    def close(self) -> None:
        self._save()
        self._file.close()
