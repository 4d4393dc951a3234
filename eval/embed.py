"""Embeddings of many images, decoded ahead on threads, of each image and its mirror image."""

from __future__ import annotations

from typing import Callable, Iterator, NamedTuple, Sequence

import numpy as np

from dsoftmax.eval.models import Embed
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.images import ImageError


class Embedded(NamedTuple):
    """The embeddings of the images ``start`` and following."""

    start: int
    views: np.ndarray  # (n, 2, D) float32: of the image, of its mirror image; 0 if unreadable
    unreadable: list[tuple[int, str]]  # (number of the image, why)


def embed_batches(
    embed: Embed,
    load: Callable[[int], np.ndarray],
    images: Sequence[int],
    batch_size: int,
    threads: int = 2,
    desc: str = "embedding",
) -> Iterator[Embedded]:
    """Embed images in order, a batch at a time.

    Parameters
    ----------
    embed : callable
        (n, 3, height, width) uint8, RGB, to (n, D): a model of `load_model`, or any function.
    load : callable
        Returns an image, (height, width, 3) uint8 in RGB, by its number; raises `ImageError` or
        `OSError` where there is none to be had. All images have one size.
    images : range
        Which images.
    batch_size : int
    threads : int
        To decode on.
    desc : str
        What the progress is headed with.
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
            yield Embedded(numbers[0], views, unreadable)
            bar.update(len(numbers))
