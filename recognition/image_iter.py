"""insightface's ``FaceImageIter`` for scripts of your own, over the pipeline of ``train.py``.

from dsoftmax.recognition.image_iter import FaceImageIter

module.fit(FaceImageIter(128, (3, 112, 112), "faces_emore/train.rec", shuffle=True), ...)
"""

from __future__ import annotations

from typing import Iterator, Sequence

import numpy as np
from mxnet import io, nd

from dsoftmax.recognition.data.augment import Augmentation
from dsoftmax.recognition.data.pipeline import Batch, Pipeline
from dsoftmax.recognition.data.records import Records

MEAN_SCALE = 0.0078125  # of pixels, where a mean is subtracted


class FaceImageIter(io.DataIter):
    """Yields batches of a ``.rec`` file as ``mx.mod.Module`` takes them.

    Images are RGB, 0 to 255, as float32; the last images of an epoch, too few for a batch, are left
    out. A broken image is replaced by the next one. Unlike insightface's, batches are decoded on
    threads ahead of time, and the order is a function of the seed and the epoch.

    Parameters
    ----------
    batch_size : int
    data_shape : (3, int, int)
        3, height and width.
    path_imgrec : str
        The ``.rec`` file, in any of insightface's styles.
    shuffle : bool
        Draw a new order in every epoch; otherwise the order of the keys.
    aug_list : None
        insightface's iterator ignores it; this one refuses it.
    mean : sequence of 3 floats, optional
        Subtracted from the pixels, which are then divided by 128. insightface's networks do that by
        themselves.
    rand_mirror, cutoff, color_jittering
        As of `Augmentation`: `mirror`, `cutoff`, `color`.
    images_filter : int
        Identities with fewer images are left out.
    data_name, label_name : str
        Of the inputs of the network.
    seed, threads : int
        As of `Pipeline`.

    Attributes
    ----------
    seq : list of int or None
        The keys of an epoch's images, in its order, if they are shuffled. You may set other ones:
        the next epochs hold these.
    id2range : dict of int to (int, int)
        For each identity record of the file the keys of its images, from the first to before the
        last. Empty if the file has no such records.

    Examples
    --------
    >>> images = FaceImageIter(128, (3, 112, 112), "faces_emore/train.rec", shuffle=True)
    >>> module.fit(images, num_epoch=20)
    """

    def __init__(
        self,
        batch_size: int,
        data_shape: Sequence[int],
        path_imgrec: str,
        shuffle: bool = False,
        aug_list: None = None,
        mean: Sequence[float] | None = None,
        rand_mirror: bool = False,
        cutoff: int = 0,
        color_jittering: int = 0,
        images_filter: int = 0,
        data_name: str = "data",
        label_name: str = "softmax_label",
        seed: int = 0,
        threads: int = 2,
    ):
        super().__init__(batch_size)
        if len(data_shape) != 3 or data_shape[0] != 3:
            raise ValueError(f"data_shape is (3, height, width), not {tuple(data_shape)}")
        if aug_list is not None:
            raise ValueError(
                "aug_list does nothing: use rand_mirror, cutoff and color_jittering, or augment "
                "the batches"
            )
        self._pipeline = Pipeline(
            Records(path_imgrec),
            batch_size,
            tuple(data_shape[1:]),
            Augmentation(bool(rand_mirror), int(color_jittering), int(cutoff)),
            seed=seed,
            shuffle=shuffle,
            min_images=images_filter,
            threads=threads,
        )
        self.provide_data = [io.DataDesc(data_name, (batch_size, *data_shape))]
        self.provide_label = [io.DataDesc(label_name, (batch_size,))]
        self._mean = None if mean is None else nd.array(mean).reshape((1, 3, 1, 1))
        self._shuffle = shuffle
        images, labels = self._pipeline.images_and_classes()
        records = self._pipeline.records
        self.imgidx = records.keys[images].tolist()
        self.seq = self.imgidx if shuffle else None
        self.id2range = _ranges(records, images, labels)
        self._epoch = -1
        self._batches: Iterator[Batch] | None = None

    def num_samples(self) -> int:
        """Return the number of images per epoch."""
        return len(self.imgidx if self.seq is None else self.seq)

    def reset(self) -> None:
        """Begin the next epoch."""
        self._epoch += 1
        if self.seq is not None and self._shuffle:
            order = np.random.default_rng((self._pipeline.seed, self._epoch))
            self.seq = order.permutation(self.seq).tolist()
        keys = self.imgidx if self.seq is None else self.seq
        self._batches = self._pipeline.batches(self._images(keys), self._epoch)

    def _images(self, keys: Sequence[int]) -> np.ndarray:
        """Return the numbers of images with these keys."""
        known, keys = self._pipeline.records.keys, np.asarray(keys, np.int64)
        images = np.searchsorted(known, keys).clip(max=len(known) - 1)
        strange = np.flatnonzero(known[images] != keys)
        if len(strange):
            raise ValueError(f"seq: the file has no image with the key {keys[strange[0]]}")
        return images

    def next(self) -> io.DataBatch:
        """Return the next batch; raise StopIteration at the end of the epoch."""
        if self._batches is None:
            self.reset()
        try:
            batch = next(self._batches)
        except RuntimeError as error:
            # At the end of a process, its pools of threads take no more tasks: the thread of
            # mx.io.PrefetchingIter is to end without a traceback.
            if "shutdown" not in str(error):
                raise
            raise StopIteration from None
        data = nd.array(batch.data, dtype="float32")
        if self._mean is not None:
            data = nd.broadcast_sub(data, self._mean) * MEAN_SCALE
        return io.DataBatch([data], [nd.array(batch.label, dtype="float32")], pad=0)


def _ranges(records: Records, images: np.ndarray, labels: np.ndarray) -> dict[int, tuple[int, int]]:
    """Return the keys of each identity's images, by the key of its record."""
    if records.style != "identity header":
        return {}
    end_of_images = int(records.keys[-1]) + 1  # where identity records begin
    keys = records.keys
    firsts = np.flatnonzero(np.diff(records.labels, prepend=-1))
    lasts = np.append(firsts[1:], len(keys)) - 1
    kept = set(labels.tolist())
    return {
        end_of_images + place: (int(keys[first]), int(keys[last]) + 1)
        for place, (first, last) in enumerate(zip(firsts, lasts))
        if int(records.labels[first]) in kept
    }
