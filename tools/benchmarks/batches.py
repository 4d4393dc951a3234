"""Run epochs of batches made by the pipeline, and by MXNet's iterators."""

from __future__ import annotations

import random
import statistics
import time
from typing import Callable, Iterator

import mxnet as mx

from dsoftmax.losses.kernels import from_numpy
from dsoftmax.recognition.common.cli import default_threads
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.data.images import decode
from dsoftmax.recognition.data.pipeline import Pipeline
from dsoftmax.recognition.data.records import Records, RecordWriter

PLAIN, IMAGE_RECORD_ITER = "plain Python iterator", "mx.io.ImageRecordIter"


def copy_images(records: Records, folder: str, most: int) -> Records:
    """Copy the first images into a file of images alone, which all contenders can read."""
    with RecordWriter(folder, records.image_size, identity_header=False) as writer:
        for image in range(min(most, len(records))):
            label, encoded = records.read(image)
            writer.add(label, encoded.tobytes())
    return Records(folder)


def decoder_floor(records: Records, threads: int) -> Callable[[int], Iterator[int]]:
    """Return an epoch that decodes every image and does nothing else."""
    # `images_per_second` needs several steps per epoch, also of a small dataset.
    step = min(64, max(len(records) // 8, 1))

    def decode_some(start: int) -> int:
        images = range(start, min(start + step, len(records)))
        for image in images:
            decode(records.read(image)[1])
        return len(images)

    def epoch(_: int) -> Iterator[int]:
        yield from map_ordered(decode_some, range(0, len(records), step), threads)

    return epoch


def our_pipeline(records: Records, batch_size: int, threads: int) -> Callable[[int], Iterator[int]]:
    """Return an epoch of the pipeline that hands each batch to MXNet."""
    pipeline = Pipeline(records, batch_size, dtype="float32", threads=threads)

    def epoch(number: int) -> Iterator[int]:
        for batch in pipeline.epoch(number):
            from_numpy(batch.data, mx.cpu(0), "float32").wait_to_read()
            yield len(batch.label)

    return epoch


def image_record_iter(
    records: Records, batch_size: int, threads: int
) -> Callable[[int], Iterator[int]]:
    """Return an epoch of MXNet's iterator in C++."""
    height, width = records.image_size
    iterator = mx.io.ImageRecordIter(
        path_imgrec=records.path,
        path_imgidx=records.path[:-4] + ".idx",
        data_shape=(3, height, width),
        batch_size=batch_size,
        shuffle=True,
        rand_mirror=True,
        preprocess_threads=threads,
        verbose=False,
    )

    def epoch(_: int) -> Iterator[int]:
        iterator.reset()
        for batch in iterator:
            batch.data[0].wait_to_read()
            yield batch_size - batch.pad

    return epoch


class PlainIterator(mx.io.DataIter):
    """Reads one image at a time in Python, with some NDArrays each, as insightface does."""

    def __init__(self, records: Records, batch_size: int):
        super().__init__(batch_size)
        self.reader = mx.recordio.MXIndexedRecordIO(records.path[:-4] + ".idx", records.path, "r")
        self.keys = list(self.reader.keys)
        self.shape = (batch_size, 3, *records.image_size)
        self.provide_data = [mx.io.DataDesc("data", self.shape)]
        self.provide_label = [mx.io.DataDesc("softmax_label", (batch_size,))]
        self.reset()

    def reset(self) -> None:
        """Shuffle and begin anew."""
        random.shuffle(self.keys)
        self.position = 0

    def next(self) -> mx.io.DataBatch:
        """Make the next batch."""
        if self.position + self.batch_size > len(self.keys):
            raise StopIteration
        data, label = mx.nd.empty(self.shape), mx.nd.empty(self.shape[:1])
        for row in range(self.batch_size):
            header, encoded = mx.recordio.unpack(
                self.reader.read_idx(self.keys[self.position + row])
            )
            image = mx.image.imdecode(encoded)
            if random.random() < 0.5:
                image = mx.nd.flip(image, axis=1)
            data[row][:] = mx.nd.transpose(image, axes=(2, 0, 1))
            label[row][:] = header.label
        self.position += self.batch_size
        return mx.io.DataBatch([data], [label], 0)


def plain_iterator(records: Records, batch_size: int) -> Callable[[int], Iterator[int]]:
    """Return an epoch of the plain iterator behind one prefetching thread."""
    iterator = mx.io.PrefetchingIter(PlainIterator(records, batch_size))

    def epoch(_: int) -> Iterator[int]:
        iterator.reset()
        for batch in iterator:
            batch.data[0].wait_to_read()
            yield batch_size

    return epoch


def images_per_second(epoch: Callable[[int], Iterator[int]], number: int, seconds: float) -> float:
    """Measure for about `seconds`, without the first batches, which fill the buffers."""
    images, started, stop = 0, 0.0, 0.0
    while not started or time.perf_counter() < stop:
        for step, size in enumerate(epoch(number)):
            if not started:
                if step >= 4:
                    started = time.perf_counter()
                    stop = started + seconds
                continue
            images += size
            if time.perf_counter() >= stop:
                break
    return images / (time.perf_counter() - started)


def measure(
    records: Records, batch_size: int, threads: int, rounds: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Measure all contenders in turns.

    Returns
    -------
    dict
        By contender: ``threads``, and the median, lowest and highest images per second.
    """
    mxnet_threads = min(threads, max(default_threads() // 2 - 1, 1))
    contenders = {
        f"decoder alone, {threads} threads": (threads, decoder_floor(records, threads)),
        f"pipeline, {threads} threads": (threads, our_pipeline(records, batch_size, threads)),
        f"pipeline, {mxnet_threads} thread{'s' * (mxnet_threads > 1)}": (
            mxnet_threads,
            our_pipeline(records, batch_size, mxnet_threads),
        ),
        IMAGE_RECORD_ITER: (mxnet_threads, image_record_iter(records, batch_size, threads)),
        PLAIN: (1, plain_iterator(records, batch_size)),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, (_, epoch) in contenders.items():
            rates[name].append(images_per_second(epoch, number, seconds))
    return {
        name: {
            "threads": contenders[name][0],
            "median": statistics.median(measured),
            "low": min(measured),
            "high": max(measured),
        }
        for name, measured in rates.items()
    }


def table(results: dict[str, dict[str, float]]) -> str:
    """Lay out the results, with their ratios to MXNet's two iterators and to the decoder."""
    floor = next(iter(results.values()))["median"]
    plain, of_mxnet = results[PLAIN]["median"], results[IMAGE_RECORD_ITER]["median"]
    columns = f"{'low-high':>16}{'of decoder':>12}{'x RecordIter':>14}{'x plain':>9}"
    lines = [f"{'':30}{'images/s':>10}{columns}"]
    for name, rate in results.items():
        middle = rate["median"]
        spread = f"{rate['low']:.0f}-{rate['high']:.0f}"
        lines.append(
            f"{name:30}{middle:10.0f}{spread:>16}{middle / floor:12.2f}{middle / of_mxnet:14.2f}"
            f"{middle / plain:9.2f}"
        )
    return "\n".join(lines)
