import logging
import threading

import cv2
import numpy as np
import pytest
from huge_images import HUGE

from dsoftmax.recognition.data.augment import Augmentation
from dsoftmax.recognition.data.pipeline import Pipeline
from dsoftmax.recognition.data.recordio import RecordError
from dsoftmax.recognition.data.records import Records, RecordWriter

PLAIN = Augmentation(mirror=False)
EVERYTHING = Augmentation(mirror=True, color=2, cutoff=9)


def batches(pipeline, epoch=0, start=0):
    return list(pipeline.epoch(epoch, start))


def assert_equal(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second):
        for part, other_part in zip(one, other):
            np.testing.assert_array_equal(part, other_part)


def joined(parts):
    return [np.concatenate(arrays) for arrays in zip(*parts)]


@pytest.fixture
def records(dataset):
    folder, _ = dataset(counts=(5, 3, 8, 1, 6))
    return Records(folder)


def test_an_epoch_holds_every_image_once_as_mxnet_decodes_it(records):
    import mxnet as mx

    pipeline = Pipeline(records, 4, augmentation=PLAIN, keep_partial=True)
    data, label, image = joined(batches(pipeline))
    assert sorted(image) == list(range(23))
    assert image.tolist() != sorted(image)
    for row in range(23):
        true_label, encoded = records.read(image[row])
        assert label[row] == true_label
        reference = mx.image.imdecode(encoded.tobytes()).asnumpy().transpose(2, 0, 1)  # RGB, CHW
        np.testing.assert_allclose(data[row].astype(int), reference, atol=2)


def test_shapes_and_types(records):
    (batch, *_) = batches(Pipeline(records, 4))
    assert batch.data.shape == (4, 3, 32, 32)
    assert [part.dtype for part in batch] == [np.uint8, np.int32, np.int64]
    (floats, *_) = batches(Pipeline(records, 4, dtype="float32"))
    assert floats.data.dtype == np.float32
    np.testing.assert_array_equal(floats.data, batch.data)
    assert floats.data.max() > 1


def test_order_is_a_function_of_seed_and_epoch(records):
    one, same = (Pipeline(records, 4, seed=7, augmentation=EVERYTHING) for _ in range(2))
    assert_equal(batches(one, 3), batches(same, 3))
    orders = [
        joined(batches(Pipeline(records, 4, seed=seed), epoch))[2].tolist()
        for seed, epoch in ((7, 3), (7, 4), (8, 3))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("keep_partial", [False, True])
def test_going_on_in_the_middle_gives_the_very_same_batches(records, keep_partial):
    pipeline = Pipeline(records, 4, seed=1, augmentation=EVERYTHING, keep_partial=keep_partial)
    whole = batches(pipeline, epoch=2)
    assert len(whole) == len(pipeline) == (6 if keep_partial else 5)
    for start in range(len(whole) + 1):
        assert_equal(batches(pipeline, 2, start), whole[start:])


def test_threads_and_prefetching_change_nothing(records):
    whole = batches(Pipeline(records, 5, augmentation=EVERYTHING, threads=1, prefetch=1))
    assert_equal(batches(Pipeline(records, 5, augmentation=EVERYTHING, threads=7)), whole)


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_together_see_what_one_would(dataset, workers):
    """Augmentation included: draws belong to a position of the epoch, not to a worker's step."""
    records = Records(dataset(counts=(9,) * 6)[0])
    options = {"seed": 3, "augmentation": EVERYTHING, "keep_partial": True}
    alone = batches(Pipeline(records, 4 * workers, **options), epoch=1)
    shards = [
        batches(Pipeline(records, 4, shard=(rank, workers), **options), epoch=1)
        for rank in range(workers)
    ]
    assert len({len(shard) for shard in shards}) == 1
    together = [
        tuple(np.concatenate(parts) for parts in zip(*step_parts)) for step_parts in zip(*shards)
    ]
    assert_equal(together, alone)


@pytest.mark.parametrize("images", [12, 13, 14, 17])
def test_the_last_images_are_dealt_out_evenly_or_dropped(dataset, images):
    records = Records(dataset(counts=(images,))[0])
    shards = [
        batches(Pipeline(records, 4, shard=(rank, 3), keep_partial=True)) for rank in range(3)
    ]
    left = images - 12
    sizes = [sum(len(batch.label) for batch in shard[1:]) for shard in shards]
    assert sum(sizes) == (left if left >= 3 else 0)
    assert max(sizes) - min(sizes) <= 1
    assert len({len(shard) for shard in shards}) == 1


def test_filtered_identities(records):
    kept = Pipeline(records, 19, min_images=5)
    (batch,) = batches(kept)
    assert sorted(set(batch.label)) == [0, 2, 4]
    assert kept.num_classes == 5
    renumbered = Pipeline(records, 19, min_images=5, remap_labels=True)
    (again,) = batches(renumbered)
    assert renumbered.num_classes == 3
    np.testing.assert_array_equal(again.image, batch.image)
    np.testing.assert_array_equal(again.label, batch.label // 2)
    with pytest.raises(ValueError, match="no identity has 9 images"):
        Pipeline(records, 1, min_images=9)


def test_other_sizes_are_resized_to_cover_and_cropped(tmp_path):
    image = np.zeros((60, 40, 3), np.uint8)
    image[:, :, 0] = np.linspace(0, 255, 60)[:, None]  # blue grows downwards
    with RecordWriter(tmp_path, (60, 40)) as writer:
        writer.add(0, cv2.imencode(".png", image)[1].tobytes())
    (batch,) = batches(Pipeline(Records(tmp_path), 1, image_size=(20, 20), augmentation=PLAIN))
    blue = batch.data[0, 2].mean(axis=1)
    assert batch.data.shape == (1, 3, 20, 20)
    assert batch.data[0, :2].max() == 0
    # 60×40 → 30×20, and rows 5 to 25 of it are left: from 1/6 to 5/6 of the height.
    np.testing.assert_allclose(blue[[0, -1]], [255 * 5.5 / 30, 255 * 24.5 / 30], atol=4)


def test_grey_png_becomes_three_channels(tmp_path):
    grey = np.full((32, 32), 77, np.uint8)
    with RecordWriter(tmp_path, (32, 32)) as writer:
        writer.add(0, cv2.imencode(".png", grey)[1].tobytes())
    (batch,) = batches(Pipeline(Records(tmp_path), 1))
    assert np.all(batch.data == 77)


class TestBadImages:
    @pytest.fixture
    def damaged(self, tmp_path, jpeg):
        """Images 3 (cut off) and 7 (no image) of twelve are broken."""
        with RecordWriter(tmp_path / "damaged", (32, 32)) as writer:
            for number in range(12):
                image = jpeg()
                image = {3: image[: len(image) // 2], 7: b"no image"}.get(number, image)
                writer.add(number // 2, image)
        return Records(tmp_path / "damaged")

    def test_are_skipped_counted_and_told(self, damaged, caplog):
        pipeline = Pipeline(damaged, 4, seed=5)
        with caplog.at_level(logging.WARNING):
            first = batches(pipeline)
            batches(pipeline, epoch=1)
        assert sorted(pipeline.bad_images) == [3, 7]
        assert "end marker" in pipeline.bad_images[3]
        assert "image 3 (key 4) is skipped" in caplog.text
        assert len(caplog.records) == 2  # not again in the second epoch
        images = np.concatenate([batch.image for batch in first])
        assert len(images) == 12
        assert not {3, 7} & set(images)

    def test_do_not_disturb_the_order(self, damaged):
        pipeline = Pipeline(damaged, 4, seed=5)
        whole = batches(pipeline)
        assert_equal(batches(Pipeline(damaged, 4, seed=5), start=1), whole[1:])

    @pytest.mark.parametrize("kind", HUGE)
    def test_are_those_that_announce_too_many_pixels(self, tmp_path, jpeg, kind):
        with RecordWriter(tmp_path, (32, 32)) as writer:
            for number in range(6):
                writer.add(number, HUGE[kind] if number == 2 else jpeg())
        pipeline = Pipeline(Records(tmp_path), 6)
        (batch,) = batches(pipeline)
        assert 2 not in batch.image
        assert list(pipeline.bad_images) == [2]

    def test_nothing_but_bad_images_is_an_error(self, tmp_path):
        with RecordWriter(tmp_path, (32, 32)) as writer:
            for _ in range(5):
                writer.add(0, b"no image")
        with pytest.raises(RecordError, match="100 images in a row can't be decoded"):
            batches(Pipeline(Records(tmp_path), 5))

    def test_a_damaged_record_stops_the_epoch(self, records):
        offset = int(records.offsets[2])
        with open(records.path, "r+b") as file:
            file.seek(offset)
            file.write(b"\0\0\0\0")
        with pytest.raises(RecordError, match=rf"image 2 \(key 3\) of .*offset {offset}"):
            batches(Pipeline(records, 23))


def test_leaving_early_stops_the_threads(records):
    before = threading.active_count()
    stream = Pipeline(records, 2, threads=3).epoch(0)
    next(stream)
    assert threading.active_count() > before
    stream.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number, 1 or more, not 0"),
        ({"batch_size": 24}, "23 images are fewer than one batch of 24"),
        ({"batch_size": 4, "seed": -1}, "seed must be"),
        ({"batch_size": 4, "dtype": "float16"}, "dtype must be 'uint8' or 'float32'"),
        ({"batch_size": 4, "shard": (2, 2)}, "0 <= rank < size"),
        ({"batch_size": 4, "threads": 0}, "threads must be"),
    ],
)
def test_bad_options(records, options, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(records, **options)


@pytest.mark.realdata
def test_real_faces(real_data):
    records = Records(real_data / "lfw")
    pipeline = Pipeline(records, 64, min_images=3, remap_labels=True)
    assert pipeline.num_classes == 516
    batch = next(pipeline.epoch(0))
    assert batch.data.shape == (64, 3, 112, 112)
    assert 60 < batch.data.mean() < 180
    assert batch.data[:, 0].mean() > batch.data[:, 2].mean()  # skin: more red than blue


def test_a_label_outside_the_classes_is_named(records):
    records.labels  # noqa: B018 (by the header's ranges, five classes)
    read = records.read
    records.read = lambda image: (1000 if image == 7 else read(image)[0], read(image)[1])
    with pytest.raises(RecordError, match=r"image 7 \(key 8\) has the label 1000, .* 5 classes"):
        batches(Pipeline(records, 23))
