"""Embed images and their mirror images, while threads decode ahead."""

from __future__ import annotations

import os
from typing import Callable, Iterator, NamedTuple, Sequence

import numpy as np

from dsoftmax.eval import metrics
from dsoftmax.eval.models import Embed
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.images import ImageError, decode
from dsoftmax.recognition.data.inputs import Images


def embed_images(
    embed: Embed,
    images: Images | Sequence[str | os.PathLike | np.ndarray],
    flip: bool = True,
    size: tuple[int, int] | None = None,
    batch_size: int = 32,
    threads: int = 2,
) -> np.ndarray:
    """Embed faces.

    Parameters
    ----------
    embed : callable
        A model of `load_model`, or any function that maps (n, 3, height, width) uint8, RGB, to
        (n, D).
    images : Images, or sequence
        What `open_images` returns; or paths of image files, or arrays (height, width, 3) uint8 in
        RGB, of any sizes. Faces are aligned, or come with landmarks.
    flip : bool
        Whether to add the embedding of the mirror image, as verification does.
    size : (int, int), optional
        Height and width that images are resized to; by default those the model was trained with,
        or else those of the first image.
    batch_size : int
    threads : int
        Decoding threads.

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
    >>> everybody = embed_images(embed, open_images("people"))  # doctest: +SKIP
    """
    images = images if isinstance(images, Images) else _Given(images)
    if not len(images):
        raise ValueError("there is no image to embed")
    size = size or getattr(embed, "image_size", None) or images.image_size
    faces = embed_faces(embed, images, size, flip, batch_size, threads, desc=None)
    for number, why in faces.unreadable:
        raise ImageError(f"{images.name(number)}: {why}")
    return faces.embeddings


class EmbeddedFaces(NamedTuple):
    """Embeddings of images, and how that went."""

    embeddings: np.ndarray  # (n, D) float32 of length 1, of the images that can be read
    readable: list[int]  # the numbers of those images
    unreadable: list[tuple[int, str]]  # (number of the image, why)
    fitted: list[tuple[int, tuple[int, int]]]  # (number, height and width), see `face_of`


def embed_faces(
    embed: Embed,
    images: Images,
    size: tuple[int, int],
    flip: bool = True,
    batch_size: int = 32,
    threads: int = 2,
    desc: str | None = "embedding",
) -> EmbeddedFaces:
    """Embed all images that can be read.

    Parameters
    ----------
    embed, flip, batch_size, threads
        See `embed_images`.
    images : Images
    size : (int, int)
        Height and width of the network's input.
    desc : str, optional
        Name of the job in the progress line; None for no such line.
    """
    rows, readable, unreadable, fitted = [], [], [], []
    numbers = range(len(images))
    for batch in face_batches(embed, images, numbers, size, flip, batch_size, threads, desc):
        left_out = {number for number, _ in batch.unreadable}
        kept = [place for place in range(len(batch.rows)) if batch.start + place not in left_out]
        rows.append(batch.rows[kept])
        readable += [batch.start + place for place in kept]
        unreadable += batch.unreadable
        fitted += batch.fitted
    embeddings = np.concatenate([part for part in rows if part.size] or rows)
    return EmbeddedFaces(metrics.normalized(embeddings), readable, unreadable, fitted)


class FaceBatch(NamedTuple):
    """Embeddings of consecutive images, the first of which is number ``start``."""

    start: int
    rows: np.ndarray  # (n, D) float32; 0 if unreadable, and D is 0 if all of them are
    unreadable: list[tuple[int, str]]  # (number of the image, why)
    fitted: list[tuple[int, tuple[int, int]]]  # (number, height and width), see `face_of`


def face_batches(
    embed: Embed,
    images: Images,
    numbers: Sequence[int],
    size: tuple[int, int],
    flip: bool,
    batch_size: int,
    threads: int,
    desc: str | None = "embedding",
) -> Iterator[FaceBatch]:
    """Embed images, or sum their embeddings with their mirror images', one batch at a time.

    Parameters
    ----------
    embed, images, size, flip, batch_size, threads, desc
        See `embed_faces`.
    numbers : range
        Of the images to embed.
    """
    given: dict[int, tuple[int, int]] = {}  # sizes of fitted images, some of them loaded ahead

    def load(number: int) -> np.ndarray:
        face = images.load(number, size)
        if face.fitted_from:
            given[number] = face.fitted_from
        return face.image

    for batch in embed_batches(embed, load, numbers, batch_size, threads, desc, flip):
        own = range(batch.start, batch.start + len(batch.views))
        fitted = [(number, given.pop(number)) for number in own if number in given]
        yield FaceBatch(batch.start, batch.views.sum(axis=1), batch.unreadable, fitted)


class _Given(Images):
    """Paths and arrays."""

    def __init__(self, images: Sequence[str | os.PathLike | np.ndarray]):
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    @property
    def image_size(self) -> tuple[int, int]:
        try:
            return self.decode(0).shape[:2]
        except ImageError as error:
            raise ImageError(f"{self.name(0)}: {error}") from None

    def name(self, number: int) -> str:
        image = self._images[number]
        return f"image {number}" if isinstance(image, np.ndarray) else os.fspath(image)

    def decode(self, number: int) -> np.ndarray:
        image = self._images[number]
        if not isinstance(image, np.ndarray):
            return decode(np.fromfile(image, np.uint8))
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise ValueError(
                f"an image is (height, width, 3) uint8 in RGB, not {image.shape} {image.dtype}"
            )
        return image[:, :, ::-1]


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
    desc: str | None = "embedding",
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
    desc : str, optional
        Name of the job in the progress line; None for no such line.
    flip : bool
        Whether to embed mirror images, too; without them `views` are (n, 1, D).

    Yields
    ------
    EmbeddedBatch
    """
    embedded = _embed_batches(embed, load, images, batch_size, threads, flip)
    if desc is None:
        yield from embedded
        return
    with progress(total=len(images), desc=desc, unit="images") as bar:
        for batch in embedded:
            yield batch
            bar.update(len(batch.views))


def _embed_batches(
    embed: Embed,
    load: Callable[[int], np.ndarray],
    images: Sequence[int],
    batch_size: int,
    threads: int,
    flip: bool,
) -> Iterator[EmbeddedBatch]:
    def load_batch(numbers: Sequence[int]) -> tuple[Sequence[int], list, list]:
        loaded, unreadable = [], []
        for number in numbers:
            try:
                loaded.append((number, load(number)))
            except (ImageError, OSError) as error:
                unreadable.append((number, str(error)))
        return numbers, loaded, unreadable

    batches = [images[at : at + batch_size] for at in range(0, len(images), batch_size)]
    for numbers, loaded, unreadable in map_ordered(load_batch, batches, threads):
        views = np.zeros((len(numbers), 1 + flip, 0), np.float32)
        if loaded:
            embedded = _views(embed, np.stack([image for _, image in loaded]), flip)
            places = [number - numbers[0] for number, _ in loaded]
            views = np.zeros((len(numbers), *embedded.shape[1:]), np.float32)
            views[places] = embedded
        yield EmbeddedBatch(numbers[0], views, unreadable)


def _views(embed: Embed, images: np.ndarray, flip: bool) -> np.ndarray:
    """Return the embeddings (n, 1 or 2, D) of images (n, height, width, 3), and mirrored ones."""
    batch = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    views = [embed(batch)]
    if flip:
        views.append(embed(np.ascontiguousarray(batch[:, :, :, ::-1])))
    return np.stack(views, axis=1)
