"""insightface's iterator: what scripts read of it, and what a Module trains on."""

from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.recognition.image_iter import FaceImageIter

COUNTS = (5, 3, 8, 1, 6)


@pytest.fixture
def rec(dataset):
    folder, _ = dataset(counts=COUNTS)
    return str(folder / "train.rec")


def labels_of(iterator):
    return np.concatenate([batch.label[0].asnumpy() for batch in iterator])


def test_batches_as_insightface_makes_them(rec):
    iterator = FaceImageIter(4, (3, 32, 32), rec)
    (name, shape), *_ = (tuple(one)[:2] for one in iterator.provide_data)
    assert (name, shape) == ("data", (4, 3, 32, 32))
    assert tuple(iterator.provide_label[0])[:2] == ("softmax_label", (4,))
    batches = list(iterator)
    assert len(batches) == 23 // 4  # the rest is dropped
    assert batches[0].data[0].dtype == batches[0].label[0].dtype == np.float32
    record = mx.recordio.MXIndexedRecordIO(rec.replace(".rec", ".idx"), rec, "r")
    header, encoded = mx.recordio.unpack(record.read_idx(6))  # not shuffled: keys 1, 2, …
    reference = mx.image.imdecode(encoded).asnumpy().transpose(2, 0, 1)
    np.testing.assert_allclose(batches[1].data[0][1].asnumpy(), reference, atol=2)
    assert batches[1].label[0][1].asscalar() == header.label


def test_order(rec):
    in_order = [label for label, count in enumerate(COUNTS) for _ in range(count)]
    assert labels_of(FaceImageIter(1, (3, 32, 32), rec)).tolist() == in_order
    shuffled = FaceImageIter(1, (3, 32, 32), rec, shuffle=True)
    first = labels_of(shuffled)
    shuffled.reset()
    second = labels_of(shuffled)
    assert sorted(first) == sorted(second) == in_order
    assert first.tolist() != in_order
    assert first.tolist() != second.tolist()
    again = FaceImageIter(1, (3, 32, 32), rec, shuffle=True)
    assert labels_of(again).tolist() == first.tolist()


def test_seq_is_the_order_of_an_epoch(rec):
    iterator = FaceImageIter(1, (3, 32, 32), rec, shuffle=True)
    record = mx.recordio.MXIndexedRecordIO(rec.replace(".rec", ".idx"), rec, "r")

    def labels_by_file():
        return [mx.recordio.unpack(record.read_idx(key))[0].label for key in iterator.seq]

    for _ in range(2):
        iterator.reset()
        assert labels_of(iterator).tolist() == labels_by_file()
    iterator.seq = iterator.seq[:10]
    expected = labels_by_file()
    iterator.reset()
    assert sorted(labels_of(iterator)) == sorted(expected)
    assert iterator.num_samples() == 10
    in_order = FaceImageIter(1, (3, 32, 32), rec)
    in_order.seq = [7, 2]
    in_order.reset()
    assert labels_of(in_order).tolist() == [1, 0]
    in_order.seq = [7, 99]
    with pytest.raises(ValueError, match="99"):
        in_order.reset()


def test_keys_and_ranges_are_those_of_the_file(rec):
    iterator = FaceImageIter(4, (3, 32, 32), rec, shuffle=True, images_filter=5)
    record = mx.recordio.MXIndexedRecordIO(rec.replace(".rec", ".idx"), rec, "r")
    header, _ = mx.recordio.unpack(record.read_idx(0))
    expected = {}
    for identity in range(int(header.label[0]), int(header.label[1])):
        first, end = mx.recordio.unpack(record.read_idx(identity))[0].label
        if end - first >= 5:
            expected[identity] = (int(first), int(end))
    assert len(expected) == 3
    assert iterator.id2range == expected
    assert iterator.seq == [key for first, end in expected.values() for key in range(first, end)]
    assert iterator.num_samples() == 5 + 8 + 6
    assert FaceImageIter(4, (3, 32, 32), rec).seq is None


def test_files_without_identity_records(dataset):
    folder, _ = dataset(counts=COUNTS, identity_header=False)
    iterator = FaceImageIter(4, (3, 32, 32), str(folder / "train.rec"), shuffle=True)
    assert iterator.id2range == {}
    assert len(iterator.seq) == 23


def test_mean(rec):
    plain, less = (
        next(FaceImageIter(4, (3, 32, 32), rec, mean=mean)).data[0].asnumpy()
        for mean in (None, (10, 20, 30))
    )
    mean = np.reshape([10, 20, 30], (3, 1, 1))
    np.testing.assert_allclose(less, (plain - mean) / 128, rtol=1e-6)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("cannot schedule new futures after shutdown", StopIteration),
        ("cannot schedule new futures after interpreter shutdown", StopIteration),
        ("another error", RuntimeError),
    ],
)
def test_a_prefetching_thread_ends_with_its_process(rec, monkeypatch, message, expected):
    def submit(*_):
        raise RuntimeError(message)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    with pytest.raises(expected):
        FaceImageIter(4, (3, 32, 32), rec).next()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"data_shape": (32, 32)}, "data_shape"),
        ({"data_shape": (1, 32, 32)}, "data_shape"),
        ({"aug_list": []}, "aug_list"),
    ],
)
def test_refusals(rec, arguments, problem):
    with pytest.raises(ValueError, match=problem):
        FaceImageIter(4, path_imgrec=rec, **{"data_shape": (3, 32, 32), **arguments})


def test_a_module_trains_on_it(rec):
    data, label = mx.sym.var("data"), mx.sym.var("softmax_label")
    pooled = mx.sym.Pooling((data - 127.5) / 128, kernel=(8, 8), stride=(8, 8), pool_type="avg")
    classes = mx.sym.FullyConnected(pooled, num_hidden=len(COUNTS))
    module = mx.mod.Module(mx.sym.SoftmaxOutput(classes, label))
    iterator = FaceImageIter(4, (3, 32, 32), rec, shuffle=True)
    metric = mx.metric.CrossEntropy()
    module.fit(iterator, eval_metric=metric, num_epoch=20, optimizer_params={"learning_rate": 0.1})
    assert dict(module.score(iterator, metric))["cross-entropy"] < np.log(len(COUNTS)) / 2
