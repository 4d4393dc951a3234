"""Embed many images and their mirror images, while threads decode ahead."""

from __future__ import annotations

from typing import Callable, Iterator, NamedTuple, Sequence

import numpy as np

from dsoftmax.eval.models import Embed
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.images import ImageError


class EmbeddedBatch(NamedTuple):
    """Embeddings of consecutive images, the first of which is number ``start``."""

    start: int
    views: np.ndarray  # (n, 2, D) float32: the image's, its mirror image's; 0 if unreadable
    unreadable: list[tuple[int, str]]  # (number of the image, why)


def embed_batches(
    embed: Embed,
    load: Callable[[int], np.ndarray],
    images: Sequence[int],
    batch_size: int,
    threads: int = 2,
    desc: str = "embedding",
) -> Iterator[EmbeddedBatch]:
    """Embed images in order, one batch at a time.

    Parameters
    ----------
    embed : callable
        Maps (n, 3, height, width) uint8, RGB, to (n, D): a model of `load_model`, or any function.
    load : callable
        Returns an image, (height, width, 3) uint8 in RGB, by its number; raises `ImageError` or
        `OSError` if the image can't be read. All images have the same size.
    images : range
        The numbers of the images.
    batch_size : int
    threads : int
        Decoding threads.
    desc : str
        Name of the job in the progress line.

    Yields
    ------
    EmbeddedBatch
    """

    def load_batch(numbers: Sequence[int]) -> tuple[Sequence[int], list, list]:
        loaded, unreadable = [], []
        for number in numbers:
            try:
                loaded.append((number, load(number)))
            except (ImageError, OSError) as error:
                unreadable.append((number, str(error)))
        return numbers, loaded, unreadable

    batches = [images[at : at + batch_size] for at in range(0, len(images), batch_size)]
    with progress(total=len(images), desc=desc, unit="images") as bar:
        for numbers, loaded, unreadable in map_ordered(load_batch, batches, threads):
            views = np.zeros((len(numbers), 2, 0), np.float32)
            if loaded:
                batch = np.ascontiguousarray(
                    np.stack([image for _, image in loaded]).transpose(0, 3, 1, 2)
                )
                both = [embed(batch), embed(np.ascontiguousarray(batch[:, :, :, ::-1]))]
                places = [number - numbers[0] for number, _ in loaded]
                views = np.zeros((len(numbers), 2, both[0].shape[1]), np.float32)
                views[places] = np.stack(both, axis=1)
            yield EmbeddedBatch(numbers[0], views, unreadable)
            bar.update(len(numbers))
