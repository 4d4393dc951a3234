"""Measure how fast training batches are made, against MXNet's own ways.

    python tools/bench_data.py                      on synthetic faces
    python tools/bench_data.py --input faces_emore  on the first images of a dataset

All contenders read the same records in one run, in turns, and deliver shuffled, mirrored batches
as float32 NDArrays: the pipeline; `mx.io.ImageRecordIter`; and a plain Python iterator as
insightface's (`mx.image.imdecode`, an NDArray an image, one prefetch thread). The decoder alone,
on as many threads, is the floor. ImageRecordIter takes no more than half the cores less one,
whatever it is asked for, so the pipeline also runs with that number.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from typing import Callable, Iterator

import numpy as np

from dsoftmax.recognition.common.cli import add_json_flag, command, default_threads, print_json
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.preflight import check_mxnet
from dsoftmax.recognition.data.images import decode
from dsoftmax.recognition.data.pipeline import Pipeline
from dsoftmax.recognition.data.records import Records, RecordWriter
from dsoftmax.recognition.data.synthetic import make_dataset

check_mxnet()

import mxnet as mx  # noqa: E402

from dsoftmax.losses.kernels import from_numpy  # noqa: E402

PLAIN, IMAGE_RECORD_ITER = "plain Python iterator", "mx.io.ImageRecordIter"


def copy_images(records: Records, folder: str, most: int) -> Records:
    """Copy the first images into a file of nothing but images, which all contenders can read."""
    with RecordWriter(folder, records.image_size, identity_header=False) as writer:
        for image in range(min(most, len(records))):
            label, encoded = records.read(image)
            writer.add(label, encoded.tobytes())
    return Records(folder)


def decoder_floor(records: Records, threads: int) -> Callable[[int], Iterator[int]]:
    """Decode every image and do nothing else."""

    def epoch(_: int) -> Iterator[int]:
        rows = range(0, len(records), 64)

        def decode_some(start: int) -> int:
            images = range(start, min(start + 64, len(records)))
            for image in images:
                decode(records.read(image)[1])
            return len(images)

        yield from map_ordered(decode_some, rows, threads)

    return epoch


def our_pipeline(records: Records, batch_size: int, threads: int) -> Callable[[int], Iterator[int]]:
    """Run the pipeline, and hand each batch to MXNet."""
    pipeline = Pipeline(records, batch_size, dtype="float32", threads=threads)

    def epoch(number: int) -> Iterator[int]:
        for batch in pipeline.epoch(number):
            from_numpy(batch.data, mx.cpu(0), "float32").wait_to_read()
            yield len(batch.label)

    return epoch


def image_record_iter(
    records: Records, batch_size: int, threads: int
) -> Callable[[int], Iterator[int]]:
    """Run MXNet's iterator in C++."""
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
    """One image at a time in Python, each a few NDArrays, as insightface's FaceImageIter."""

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
    """Run the plain iterator behind one prefetching thread."""
    iterator = mx.io.PrefetchingIter(PlainIterator(records, batch_size))

    def epoch(_: int) -> Iterator[int]:
        iterator.reset()
        for batch in iterator:
            batch.data[0].wait_to_read()
            yield batch_size

    return epoch


def images_per_second(epoch: Callable[[int], Iterator[int]], number: int, seconds: float) -> float:
    """Take batches for about so many seconds, not counting the first, which fill the buffers."""
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
    """Run all contenders in turns.

    Returns
    -------
    dict
        By contender: ``threads``, and the median, lowest and highest images per second.
    """
    of_mxnet = min(threads, max(default_threads() // 2 - 1, 1))
    contenders = {
        f"decoder alone, {threads} threads": (threads, decoder_floor(records, threads)),
        f"pipeline, {threads} threads": (threads, our_pipeline(records, batch_size, threads)),
        f"pipeline, {of_mxnet} thread{'s' * (of_mxnet > 1)}": (
            of_mxnet,
            our_pipeline(records, batch_size, of_mxnet),
        ),
        IMAGE_RECORD_ITER: (of_mxnet, image_record_iter(records, batch_size, threads)),
        PLAIN: (1, plain_iterator(records, batch_size)),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, (_, epoch) in contenders.items():
            rates[name].append(images_per_second(epoch, number, seconds))
    return {
        name: {
            "threads": contenders[name][0],
            "median": statistics.median(found),
            "low": min(found),
            "high": max(found),
        }
        for name, found in rates.items()
    }


def table(results: dict[str, dict[str, float]]) -> str:
    """Lay the results out, with the ratios to MXNet's two ways and to the decoder."""
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


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="bench_data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", help="a dataset; by default synthetic faces are drawn")
    parser.add_argument("--images", type=int, default=6000, help="at most so many; %(default)s")
    parser.add_argument("--batch-size", type=int, default=128, help="%(default)s")
    parser.add_argument("--threads", type=int, default=default_threads(), help="%(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each; %(default)s")
    parser.add_argument("--seconds", type=float, default=2.0, help="a turn; %(default)s")
    add_json_flag(parser)
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if args.input:
            source = args.input
        else:
            source = f"{folder}/synthetic"
            make_dataset(source, max(args.images // 20, 1), images=20, threads=args.threads)
        records = copy_images(Records(source), f"{folder}/images", args.images)
        if len(records) < 8 * args.batch_size:
            raise ValueError(
                f"{len(records)} images are too few for batches of {args.batch_size}: at least "
                f"eight batches are needed"
            )
        size = np.mean([len(records.read(image)[1]) for image in range(len(records))])
        print(
            f"{len(records)} images of {size / 1024:.1f} KB, {records.image_size[0]}x"
            f"{records.image_size[1]}, batches of {args.batch_size}, {default_threads()} cores",
            file=sys.stderr,
        )
        results = measure(records, args.batch_size, args.threads, args.rounds, args.seconds)
    if args.json:
        print_json(results, args.json)
    else:
        print(table(results))


if __name__ == "__main__":
    sys.exit(main())
