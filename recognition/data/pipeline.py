"""Training batches from records: decoded, augmented and prefetched on threads.

A batch is a function of (seed, epoch, step) alone. The order of an epoch is one permutation of all
images; the random numbers of an image depend on its position in that order. So a run can resume in
the middle of an epoch with exactly the same batches, and several workers together see the same
images as one worker with a larger batch.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Iterator, NamedTuple

import numpy as np

from dsoftmax.recognition.common.checks import whole_number
from dsoftmax.recognition.common.preflight import opencv
from dsoftmax.recognition.data.augment import DRAWS, Augmentation
from dsoftmax.recognition.data.images import ImageError, decode, fit
from dsoftmax.recognition.data.records import RecordError, Records

ROWS_PER_TASK = 16
TRIES_TO_REPLACE = 100
_PHILOX_NUMBERS = 4  # that one step of its counter yields

logger = logging.getLogger(__name__)


class Batch(NamedTuple):
    """Images of one step."""

    data: np.ndarray  # (B, 3, height, width) uint8 or float32, RGB, 0 to 255
    label: np.ndarray  # (B,) int32
    image: np.ndarray  # (B,) int64: each image's number in the Records


class TooFewImagesError(ValueError):
    """A dataset has fewer images than a batch; `images` says how many."""

    def __init__(self, message: str, images: int):
        super().__init__(message)
        self.images = images


class Pipeline:
    """Makes epochs of shuffled, augmented batches.

    Parameters
    ----------
    records : Records
        The dataset.
    batch_size : int
        Images per batch of *this* worker.
    image_size : (int, int), optional
        Height and width of the batches; by default the dataset's `property`, or its first image.
        Other images are resized to cover it and cropped in the middle.
    augmentation : Augmentation, optional
        By default mirroring alone.
    seed : int
    shuffle : bool
        Draw the order of each epoch; otherwise it is that of the records.
    dtype : {"uint8", "float32"}
        Values are 0 to 255 in both.
    keep_partial : bool
        Whether the last images of an epoch, too few for a batch, make a smaller one. Several
        workers share them evenly; fewer than one image per worker are dropped.
    shard : (int, int)
        (rank, size): of each global batch of ``size * batch_size`` images this worker gets the
        rank-th part.
    min_images : int
        Identities with fewer images are left out (``data_images_filter``).
    remap_labels : bool
        Renumber the remaining classes 0, 1, … without gaps; otherwise labels stay as they are.
    threads : int
        Decoding threads.
    prefetch : int
        Batches to make ahead.

    Attributes
    ----------
    num_classes : int
        Number of classes of the labels in the batches.
    bad_images : dict of int to str
        Images that could not be decoded so far, and why. In a batch, the next decodable image of
        the epoch replaces a bad one.

    Examples
    --------
    >>> pipeline = Pipeline(Records(folder), batch_size=4, seed=1)
    >>> [batch.data.shape for batch in pipeline.epoch(0)][:1]
    [(4, 3, 112, 112)]
    """

    def __init__(
        self,
        records: Records,
        batch_size: int,
        image_size: tuple[int, int] | None = None,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        shuffle: bool = True,
        dtype: str = "uint8",
        keep_partial: bool = False,
        shard: tuple[int, int] = (0, 1),
        min_images: int = 0,
        remap_labels: bool = False,
        threads: int = 2,
        prefetch: int = 4,
    ):
        whole_number("batch_size", batch_size, 1)
        whole_number("seed", seed, 0)
        whole_number("threads", threads, 1)
        whole_number("prefetch", prefetch, 1)
        self.records = records
        self.batch_size = int(batch_size)
        self.image_size = image_size or records.image_size
        self.augmentation = augmentation or Augmentation()
        self.seed = int(seed)
        self.shuffle = shuffle
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.uint8, np.float32):
            raise ValueError(f"dtype must be 'uint8' or 'float32', not {dtype!r}")
        self.rank, self.workers = shard
        if not 0 <= self.rank < self.workers:
            raise ValueError(f"shard must be (rank, size) with 0 <= rank < size, not {shard}")
        self.keep_partial = keep_partial
        self.threads = int(threads)
        self.prefetch = int(prefetch)
        self.bad_images: dict[int, str] = {}
        self._select(min_images, remap_labels)
        if not len(self):
            raise TooFewImagesError(
                f"{records.path}: {self.num_images} images are fewer than one batch of "
                f"{self.batch_size} for each of {self.workers} workers",
                self.num_images,
            )

    def _select(self, min_images: int, remap_labels: bool) -> None:
        """Choose the identities that have enough images, and number them."""
        self._images = np.arange(len(self.records))
        self._class_by_label: np.ndarray | None = None
        self.num_classes = self.records.num_classes
        if min_images > 1:
            labels = self.records.labels
            enough = np.bincount(labels)[labels] >= min_images
            if not enough.any():
                raise ValueError(
                    f"{self.records.path}: no identity has {min_images} images or more"
                )
            self._images = self._images[enough]
        if remap_labels:
            kept = np.unique(self.records.labels[self._images])
            self._class_by_label = np.full(kept[-1] + 1, -1, np.int64)
            self._class_by_label[kept] = np.arange(len(kept))
            self.num_classes = len(kept)

    def images_and_classes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of all images of an epoch and their classes, (n,) each."""
        labels = self.records.labels[self._images]
        return self._images, labels if self._class_by_label is None else self._class_by_label[
            labels
        ]

    @property
    def num_images(self) -> int:
        """Number of images per epoch, over all workers."""
        return len(self._images)

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return self._count_batches(len(self._images))

    def _count_batches(self, images: int) -> int:
        whole, left = divmod(images, self.batch_size * self.workers)
        return whole + (self.keep_partial and left >= self.workers)

    def __repr__(self) -> str:
        height, width = self.image_size
        return (
            f"Pipeline({self.records.path!r}: {self.num_images} images of {self.num_classes} "
            f"classes, {len(self)} batches of {self.batch_size}×3×{height}×{width} {self.dtype})"
        )

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch from step `start` on.

        Threads decode images while the caller works on earlier batches. A batch belongs to the
        caller: it is never written to again.
        """
        order = self._images
        if self.shuffle:
            order = order[self._generator(epoch, stream=1).permutation(len(order))]
        return self.batches(order, epoch, start)

    def batches(self, order: np.ndarray, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield batches of images in a given order, from step `start` on.

        Parameters
        ----------
        order : (n,) int
            Numbers of images in the records.
        epoch : int
            Chooses the random numbers of the augmentation.
        start : int
        """
        pending: deque[tuple[Batch, list[Future]]] = deque()
        with ThreadPoolExecutor(self.threads, "decode") as pool:
            try:
                for step in range(start, self._count_batches(len(order))):
                    pending.append(self._submit(pool, order, epoch, step))
                    if len(pending) > self.prefetch:
                        yield _wait_for(*pending.popleft())
                while pending:
                    yield _wait_for(*pending.popleft())
            finally:  # the caller may leave early, or a record may be damaged
                for _, tasks in pending:
                    for task in tasks:
                        task.cancel()

    def _positions(self, step: int, images: int) -> range:
        """Return the positions of an order of images that this worker takes at `step`."""
        start = step * self.batch_size * self.workers
        size = self.batch_size * self.workers
        left = images - start
        if left >= size:
            first = start + self.rank * self.batch_size
            return range(first, first + self.batch_size)
        first, end = (left * rank // self.workers for rank in (self.rank, self.rank + 1))
        return range(start + first, start + end)

    def _submit(
        self, pool: ThreadPoolExecutor, order: np.ndarray, epoch: int, step: int
    ) -> tuple[Batch, list[Future]]:
        positions = self._positions(step, len(order))
        rows = len(positions)
        draws = self._generator(epoch, positions.start).random((rows, DRAWS))
        batch = Batch(
            np.empty((rows, 3, *self.image_size), self.dtype),
            np.empty(rows, np.int32),
            np.empty(rows, np.int64),
        )
        tasks = [
            pool.submit(
                self._fill,
                Batch(*(part[row : row + ROWS_PER_TASK] for part in batch)),
                order,
                positions[row : row + ROWS_PER_TASK],
                draws[row : row + ROWS_PER_TASK],
            )
            for row in range(0, rows, ROWS_PER_TASK)
        ]
        return batch, tasks

    def _generator(self, epoch: int, position: int = 0, stream: int = 0) -> np.random.Generator:
        """Return the generator of an epoch, advanced to the image at `position`."""
        counter = [position * (DRAWS // _PHILOX_NUMBERS), stream, 0, 0]
        return np.random.Generator(np.random.Philox(key=[self.seed, epoch], counter=counter))

    def _fill(self, batch: Batch, order: np.ndarray, positions: range, draws: np.ndarray) -> None:
        cv2 = opencv()
        planes = np.empty((3, *self.image_size), np.uint8)
        for row, position in enumerate(positions):
            image, label, pixels = self._load(order, position)
            pixels = self.augmentation(pixels, draws[row].tolist())
            target = batch.data[row] if self.dtype == np.uint8 else planes
            cv2.split(pixels, [target[2], target[1], target[0]])  # BGR to RGB, into place
            if target is planes:
                batch.data[row] = planes
            batch.label[row] = label
            batch.image[row] = image

    def _load(self, order: np.ndarray, position: int) -> tuple[int, int, np.ndarray]:
        """Return number, class and pixels of the image there, or of the next decodable one."""
        for attempt in range(TRIES_TO_REPLACE):
            image = int(order[(position + attempt) % len(order)])
            label, encoded = self.records.read(image)
            if not 0 <= label < self.records.num_classes:
                raise RecordError(
                    f"{self.records.path}: image {image} (key {self.records.keys[image]}) has the "
                    f"label {label}, but the identity records say that there are "
                    f"{self.records.num_classes} classes: the .idx or the header belongs to "
                    "another file; tools/rec_info.py --rebuild-index writes a new one"
                )
            try:
                pixels = fit(decode(encoded), *self.image_size)
            except ImageError as error:
                if image not in self.bad_images:
                    self.bad_images[image] = str(error)
                    logger.warning(
                        "%s: image %d (key %d) is skipped: %s",
                        *(self.records.path, image, self.records.keys[image], error),
                    )
                continue
            if self._class_by_label is not None:
                label = int(self._class_by_label[label])
            return image, label, pixels
        raise RecordError(
            f"{self.records.path}: {TRIES_TO_REPLACE} images in a row can't be decoded, "
            f"from image {order[position]} on: {self.bad_images[int(order[position])]}"
        )


def _wait_for(batch: Batch, tasks: list[Future]) -> Batch:
    for task in tasks:
        task.result()
    return batch
