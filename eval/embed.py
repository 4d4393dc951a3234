"""Embed images and their mirror images: a list of them, or many while threads decode ahead."""

from __future__ import annotations

import os
from typing import Callable, Iterator, NamedTuple, Sequence

import numpy as np

from dsoftmax.eval import metrics
from dsoftmax.eval.models import Embed
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.images import ImageError, fit, load_rgb


def embed_images(
    embed: Embed,
    images: Sequence[str | os.PathLike | np.ndarray],
    flip: bool = True,
    size: tuple[int, int] | None = None,
    batch_size: int = 32,
) -> np.ndarray:
    """Embed a list of images of aligned faces.

    Parameters
    ----------
    embed : callable
        A model of `load_model`, or any function that maps (n, 3, height, width) uint8, RGB, to
        (n, D).
    images : sequence
        Paths of image files, or arrays (height, width, 3) uint8 in RGB; of any sizes.
    flip : bool
        Whether to add the embedding of the mirror image, as verification does.
    size : (int, int), optional
        Height and width that images are resized to; by default those the model was trained with,
        or else those of the first image.
    batch_size : int

    Returns
    -------
    (n, D) float32
        Embeddings of length 1: the inner product of two is their cosine.

    Examples
    --------
    >>> embed = load_model("models/y1/model,0")  # doctest: +SKIP
    >>> ann, bo = embed_images(embed, ["ann.jpg", "bo.jpg"])  # doctest: +SKIP
    >>> print(f"cosine {ann @ bo:.3f}")  # doctest: +SKIP
    cosine 0.062
    """
    if not len(images):
        raise ValueError("there is no image to embed")
    size = size or getattr(embed, "image_size", None) or _load(images[0]).shape[:2]
    embeddings = []
    for start in range(0, len(images), batch_size):
        loaded = [fit(_load(image), *size) for image in images[start : start + batch_size]]
        batch = np.ascontiguousarray(np.stack(loaded).transpose(0, 3, 1, 2))
        embeddings.append(_both_views(embed, batch).sum(axis=1) if flip else embed(batch))
    return metrics.normalized(np.concatenate(embeddings))


def _load(image: str | os.PathLike | np.ndarray) -> np.ndarray:
    if not isinstance(image, np.ndarray):
        try:
            return load_rgb(image)
        except ImageError as error:
            raise ImageError(f"{os.fspath(image)}: {error}") from None
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise ValueError(
            f"an image is (height, width, 3) uint8 in RGB, not {image.shape} {image.dtype}"
        )
    return image


def _both_views(embed: Embed, batch: np.ndarray) -> np.ndarray:
    """Return the embeddings (n, 2, D) of images (n, 3, height, width) and their mirror images."""
    mirrored = np.ascontiguousarray(batch[:, :, :, ::-1])
    return np.stack([embed(batch), embed(mirrored)], axis=1)


class EmbeddedBatch(NamedTuple):
    """Embeddings of consecutive images, the first of which is number ``start``."""

    start: int
    # (n, 2, D) float32: the image's, its mirror image's; (n, 1, D) without these; 0 if unreadable.
    views: np.ndarray
    unreadable: list[tuple[int, str]]  # (number of the image, why)


def embed_batches(
    embed: Embed,
    load: Callable[[int], np.ndarray],
    images: Sequence[int],
    batch_size: int,
    threads: int = 2,
    desc: str = "embedding",
    flip: bool = True,
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
    flip : bool
        Whether to embed the mirror images, too.

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
                embedded = _both_views(embed, batch) if flip else embed(batch)[:, np.newaxis]
                places = [number - numbers[0] for number, _ in loaded]
                views = np.zeros((len(numbers), *embedded.shape[1:]), np.float32)
                views[places] = embedded
            yield EmbeddedBatch(numbers[0], views, unreadable)
            bar.update(len(numbers))
