import struct
import threading

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.recognition.data.recordio import MAGIC, RecordError, RecordFile, write_record
from dsoftmax.recognition.data.records import (
    Records,
    RecordWriter,
    read_property,
    rebuild_index,
)

Header = mx.recordio.IRHeader


def write_with_mxnet(folder, records, index=True):
    """Write (key, IRHeader, image) by MXNet's own writer."""
    folder.mkdir(exist_ok=True)
    if index:
        writer = mx.recordio.MXIndexedRecordIO(
            str(folder / "train.idx"), str(folder / "train.rec"), "w"
        )
        for key, header, image in records:
            writer.write_idx(key, mx.recordio.pack(header, image))
    else:
        writer = mx.recordio.MXRecordIO(str(folder / "train.rec"), "w")
        for _, header, image in records:
            writer.write(mx.recordio.pack(header, image))
    writer.close()
    return folder


def contents(records):
    return [(label, image.tobytes()) for label, image in map(records.read, range(len(records)))]


def test_written_files_are_read_back(dataset):
    folder, images = dataset()
    records = Records(folder)
    assert records.style == "identity header"
    assert contents(records) == images
    assert records.labels.tolist() == [label for label, _ in images]
    assert records.num_classes == 4
    assert (folder / "property").read_text().strip() == "4,32,32"
    assert sorted(file.name for file in folder.iterdir()) == ["property", "train.idx", "train.rec"]


@pytest.mark.parametrize("suffix", ["", "/train", "/train.rec"])
def test_folder_prefix_and_file_name_the_same_set(dataset, suffix):
    folder, images = dataset()
    assert len(Records(f"{folder}{suffix}")) == len(images)


def test_mxnet_reads_what_is_written(dataset):
    """As insightface's FaceImageIter does: header by key 0, identities by their ranges."""
    folder, images = dataset(counts=(3, 1, 4, 2))
    reader = mx.recordio.MXIndexedRecordIO(
        str(folder / "train.idx"), str(folder / "train.rec"), "r"
    )
    header, body = mx.recordio.unpack(reader.read_idx(0))
    assert header.flag == 2
    assert body == b""
    end_of_images, end_of_identities = (int(number) for number in header.label)
    assert (end_of_images, end_of_identities) == (11, 15)
    ranges = []
    for key in range(end_of_images, end_of_identities):
        header, body = mx.recordio.unpack(reader.read_idx(key))
        ranges.append(tuple(header.label))
    assert ranges == [(1, 4), (4, 5), (5, 9), (9, 11)]
    for key, (label, image) in enumerate(images, 1):
        header, body = mx.recordio.unpack(reader.read_idx(key))
        assert (header.flag, header.label, body) == (0, label, image)


def test_image_record_iter_reads_what_is_written_without_header(dataset):
    folder, images = dataset(identity_header=False)
    iterator = mx.io.ImageRecordIter(
        path_imgrec=str(folder / "train.rec"),
        path_imgidx=str(folder / "train.idx"),
        data_shape=(3, 32, 32),
        batch_size=5,
        preprocess_threads=1,
    )
    batches = list(iterator)
    labels = np.concatenate([batch.label[0].asnumpy() for batch in batches])
    assert labels.tolist() == [label for label, _ in images]
    first = batches[0].data[0].asnumpy()[0]
    mine = mx.image.imdecode(images[0][1]).asnumpy().transpose(2, 0, 1)
    np.testing.assert_allclose(first, mine, atol=3)


def test_without_header_any_order_is_allowed(tmp_path, jpeg):
    with RecordWriter(tmp_path, (32, 32), identity_header=False) as writer:
        for label in (2, 0, 2, 1):
            writer.add(label, jpeg())
    records = Records(tmp_path)
    assert records.style == "plain"
    assert records.labels.tolist() == [2, 0, 2, 1]


def test_array_labels_and_an_image_at_key_zero(tmp_path, jpeg):
    """face2rec2 writes [class, aligned]; such an image may well be key 0."""
    images = [jpeg() for _ in range(4)]
    folder = write_with_mxnet(
        tmp_path,
        [(key, Header(0, [key // 2, 1], key, 0), image) for key, image in enumerate(images)],
    )
    records = Records(folder)
    assert records.style == "plain"
    assert contents(records) == [(key // 2, image) for key, image in enumerate(images)]
    assert records.labels.tolist() == [0, 0, 1, 1]


def test_no_key_zero(tmp_path, jpeg):
    images = [jpeg() for _ in range(3)]
    folder = write_with_mxnet(
        tmp_path, [(key, Header(0, key, key, 0), image) for key, image in zip((5, 7, 6), images)]
    )
    records = Records(folder)
    assert records.keys.tolist() == [5, 6, 7]
    assert contents(records) == [(5, images[0]), (6, images[2]), (7, images[1])]


def test_header_is_found_by_key_wherever_it_lies(tmp_path, jpeg):
    images = [jpeg() for _ in range(3)]
    folder = write_with_mxnet(
        tmp_path,
        [
            (5, Header(0, [3, 4], 5, 0), b""),
            (0, Header(0, [4, 6], 0, 0), b""),
            (2, Header(0, 7, 2, 0), images[1]),
            (1, Header(0, 7, 1, 0), images[0]),
            (4, Header(0, [1, 3], 4, 0), b""),
            (3, Header(0, 9, 3, 0), images[2]),
        ],
    )
    records = Records(folder)
    assert contents(records) == list(zip((7, 7, 9), images))
    assert records.labels.tolist() == [7, 7, 9]
    assert records.num_classes == 10


@pytest.mark.parametrize("style", ["identity header", "plain"])
def test_missing_index_is_rebuilt(dataset, style, caplog):
    folder, images = dataset(identity_header=style == "identity header")
    (folder / "train.idx").unlink()
    records = Records(folder)
    assert records.style == "unindexed"
    assert contents(records) == images
    assert records.labels.tolist() == [label for label, _ in images]
    assert "train.idx is missing" in caplog.text


def test_shuffled_style_without_index(tmp_path, jpeg, rng):
    images = [(int(label), jpeg()) for label in rng.integers(0, 5, 20)]
    folder = write_with_mxnet(
        tmp_path, [(0, Header(0, label, 0, 0), image) for label, image in images], index=False
    )
    (folder / "property").write_text("5,112,112\n20\nshuffled\n2019-01-01\n")
    records = Records(folder)
    assert contents(records) == images
    assert records.property == (5, 112, 112)


def test_ranges_beyond_float32_are_not_trusted(tmp_path, jpeg):
    """A header that speaks of 2^24 images or more was rounded: labels come from the images."""
    images = [jpeg() for _ in range(4)]
    folder = write_with_mxnet(
        tmp_path,
        [
            (key, Header(0, label, key, 0), images[key - 1])
            for key, label in zip((1, 2, 3, 4), (0, 0, 1, 1))
        ]
        + [
            (17186136, Header(0, [1, 4], 0, 0), b""),
            (17186137, Header(0, [4, 5], 0, 0), b""),
            (0, Header(0, [17186136, 17186138], 0, 0), b""),
        ],
    )
    records = Records(folder)
    assert records.labels.tolist() == [0, 0, 1, 1]
    assert contents(records) == list(zip((0, 0, 1, 1), images))
    assert records.num_classes == 2


def test_wrong_ranges_are_noticed(tmp_path, jpeg, caplog):
    images = [jpeg() for _ in range(4)]
    folder = write_with_mxnet(
        tmp_path,
        [(key, Header(0, (0, 0, 1, 1)[key - 1], key, 0), images[key - 1]) for key in (1, 2, 3, 4)]
        + [
            (5, Header(0, [1, 4], 5, 0), b""),
            (6, Header(0, [4, 5], 6, 0), b""),
            (0, Header(0, [5, 7], 0, 0), b""),
        ],
    )
    assert Records(folder).labels.tolist() == [0, 0, 1, 1]
    assert "do not fit" in caplog.text


def test_property_may_be_missing_or_wrong(dataset):
    folder, _ = dataset(counts=(2, 2))
    (folder / "property").write_text("9,32,32")
    assert Records(folder).num_classes == 9
    (folder / "property").write_text("1,32,32")  # fewer than the labels say
    assert Records(folder).num_classes == 2
    (folder / "property").unlink()
    assert Records(folder).num_classes == 2
    (folder / "property").write_text("two,32,32")
    with pytest.raises(ValueError, match=r"num_classes,height,width.*'two,32,32'"):
        read_property(folder / "property")


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("place", [0, 4, 8, 40])
def test_magic_word_inside_an_image(tmp_path, place, count):
    """MXNet cuts a payload where the word stands; both readers must put it together again."""
    word = struct.pack("<I", MAGIC)
    body = b"x" * place + word * count + b"tail!"
    with RecordWriter(tmp_path, identity_header=False) as writer:
        writer.add(3, body)
        writer.add(4, b"y" + body)  # not on a 4-byte boundary: not cut
    assert contents(Records(tmp_path)) == [(3, body), (4, b"y" + body)]
    assert Records(tmp_path).labels.tolist() == [3, 4]
    reader = mx.recordio.MXRecordIO(str(tmp_path / "train.rec"), "r")
    assert mx.recordio.unpack(reader.read())[1] == body
    by_mxnet = write_with_mxnet(tmp_path / "mxnet", [(0, Header(0, 3, 0, 0), body)])
    assert contents(Records(by_mxnet)) == [(3, body)]


def test_magic_word_inside_the_header(tmp_path):
    folder = write_with_mxnet(tmp_path, [(0, Header(0, 2, MAGIC, MAGIC << 32), b"image")])
    records = Records(folder)
    assert records.labels.tolist() == [2]
    assert contents(records) == [(2, b"image")]


def test_many_threads_read_the_same(dataset):
    folder, images = dataset(counts=(5,) * 20)
    records = Records(folder)
    wrong = []

    def read_all():
        if contents(records) != images:
            wrong.append(threading.current_thread().name)

    threads = [threading.Thread(target=read_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_cut_off_file_says_where(dataset):
    folder, _ = dataset(counts=(5,) * 4)
    whole = (folder / "train.rec").read_bytes()
    offsets = RecordFile(folder / "train.rec").scan()
    (folder / "train.rec").write_bytes(whole[: offsets[7] + 100])
    with pytest.raises(RecordError, match=r"train\.idx puts key 0 at offset \d+.*cut off"):
        Records(folder)
    (folder / "train.idx").unlink()
    with pytest.raises(RecordError, match=rf"record 7 of .*at offset {offsets[7]} is cut off"):
        Records(folder)


def cut_lines(index, lines):
    index.write_text("".join(index.read_text().splitlines(keepends=True)[:lines]))


@pytest.mark.parametrize("lines", [1, 7, 10, 13, 14])  # key 0 is the last of 15
def test_cut_off_index(dataset, lines):
    folder, _ = dataset(counts=(3, 1, 4, 2))
    cut_lines(folder / "train.idx", lines)
    message = rf"train\.idx has {lines} entries, .* 15 records by its header.*--rebuild-index"
    with pytest.raises(RecordError, match=message):
        Records(folder)


def test_cut_off_index_of_images_alone(dataset):
    folder, _ = dataset(identity_header=False)
    offsets = RecordFile(folder / "train.rec").scan()
    missing = (folder / "train.rec").stat().st_size - offsets[7]
    cut_lines(folder / "train.idx", 7)
    message = rf"train\.idx has 7 entries, .* {missing} bytes after the last of them"
    with pytest.raises(RecordError, match=message):
        Records(folder)


def test_index_that_ends_in_the_middle_of_a_number(dataset):
    folder, _ = dataset()
    index = folder / "train.idx"
    index.write_text(index.read_text()[:-3])
    with pytest.raises(RecordError, match=r"15 entries, .* bytes after the last"):
        Records(folder)


def test_index_without_lines_of_its_middle(dataset):
    folder, _ = dataset()
    index = folder / "train.idx"
    lines = index.read_text().splitlines(keepends=True)
    index.write_text("".join(lines[:3] + lines[5:]))
    with pytest.raises(RecordError, match=r"13 entries, .* 15 records by its header"):
        Records(folder)


def test_last_record_in_parts_is_the_last(tmp_path):
    """Its end is that of its last part."""
    word = struct.pack("<I", MAGIC)
    with RecordWriter(tmp_path, identity_header=False) as writer:
        for label in range(3):
            writer.add(label, b"head" + word + b"body" + word + b"tail!")
    assert len(Records(tmp_path)) == 3
    cut_lines(tmp_path / "train.idx", 2)
    with pytest.raises(RecordError, match="2 entries"):
        Records(tmp_path)


def test_index_of_another_file(dataset):
    folder, _ = dataset(counts=(9, 9), name="larger")
    other, _ = dataset(counts=(2, 2), name="smaller")
    (folder / "train.idx").write_bytes((other / "train.idx").read_bytes())
    with pytest.raises(RecordError, match=r"train\.idx .*belongs to another"):
        Records(folder)


@pytest.mark.parametrize("style", ["identity header", "plain"])
@pytest.mark.parametrize("lines", [0, 5])
def test_rebuilt_index(dataset, style, lines):
    folder, _ = dataset(identity_header=style == "identity header")
    whole = (folder / "train.idx").read_text()
    cut_lines(folder / "train.idx", lines)
    assert rebuild_index(folder) == len(whole.splitlines())
    assert (folder / "train.idx").read_text() == whole


def test_rebuilt_index_with_the_header_first(tmp_path, jpeg):
    records = [
        (0, Header(0, [3, 4], 0, 0), b""),
        (1, Header(0, 0, 1, 0), jpeg()),
        (2, Header(0, 0, 2, 0), jpeg()),
        (3, Header(0, [1, 3], 3, 0), b""),
    ]
    folder = write_with_mxnet(tmp_path, records)
    whole = (folder / "train.idx").read_text()
    (folder / "train.idx").unlink()
    assert rebuild_index(folder) == 4
    assert (folder / "train.idx").read_text() == whole


def test_an_index_that_can_not_be_rebuilt(tmp_path, jpeg):
    """Where key 0 is in the middle, nothing tells the others' keys."""
    records = [
        (1, Header(0, 0, 1, 0), jpeg()),
        (0, Header(0, [2, 3], 0, 0), b""),
        (2, Header(0, [1, 2], 2, 0), b""),
    ]
    folder = write_with_mxnet(tmp_path, records)
    before = (folder / "train.idx").read_text()
    with pytest.raises(RecordError, match="keys are in another order"):
        rebuild_index(folder)
    assert (folder / "train.idx").read_text() == before


def test_damaged_frame_says_where(dataset):
    folder, _ = dataset(identity_header=False)
    offset = int(RecordFile(folder / "train.rec").scan()[3])
    damaged = bytearray((folder / "train.rec").read_bytes())
    damaged[offset] ^= 1
    (folder / "train.rec").write_bytes(damaged)
    records = Records(folder)
    assert records.read(2)[0] == 0
    message = rf"image 3 \(key 3\) of .*train\.rec: the record at offset {offset} begins with"
    with pytest.raises(RecordError, match=message):
        records.read(3)
    with pytest.raises(RecordError, match=f"offset {offset} begins with"):
        _ = records.labels
    (folder / "train.idx").unlink()
    with pytest.raises(RecordError, match=f"record 3 of .*offset {offset}"):
        Records(folder)


def test_bad_index_lines(dataset):
    folder, _ = dataset()
    index = folder / "train.idx"
    lines = index.read_text().splitlines()
    index.write_text("\n".join([*lines[:3], "4\tabc", *lines[4:]]))
    with pytest.raises(RecordError, match=r"train\.idx: line 4 must be .*abc"):
        Records(folder)
    index.write_text("\n".join([*lines, lines[0]]))
    with pytest.raises(RecordError, match="the key 1 is in more than one line"):
        Records(folder)
    index.write_text("")
    with pytest.raises(RecordError, match=r"train\.idx"):
        Records(folder)


@pytest.mark.parametrize("label", [-1.0, 0.5, float("nan"), float("inf")])
def test_labels_that_are_no_class(tmp_path, label):
    folder = write_with_mxnet(
        tmp_path, [(0, Header(0, 1, 0, 0), b"i"), (1, Header(0, label, 1, 0), b"i")]
    )
    with pytest.raises(RecordError, match=r"image 1 \(key 1\) at offset 36 has the label"):
        _ = Records(folder).labels
    with pytest.raises(RecordError, match="not a class number"):
        Records(folder).read(1)


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such folder or \.rec file"):
        Records(tmp_path / "nowhere")
    (tmp_path / "lfw.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"no train\.rec; it holds lfw\.bin"):
        Records(tmp_path)
    (tmp_path / "train.rec").touch()
    with pytest.raises(RecordError, match="0 bytes hold no record"):
        Records(tmp_path)


class TestWriter:
    def test_leaves_nothing_when_it_fails(self, tmp_path):
        with pytest.raises(RuntimeError), RecordWriter(tmp_path / "out") as writer:
            writer.add(0, b"image")
            raise RuntimeError
        assert list((tmp_path / "out").iterdir()) == []

    def test_an_empty_set_is_an_error(self, tmp_path):
        with pytest.raises(ValueError, match="no image was given"), RecordWriter(tmp_path):
            pass
        assert list(tmp_path.iterdir()) == []

    def test_refuses_ungrouped_images(self, tmp_path):
        with pytest.raises(ValueError, match="class 0 comes a second time"):
            with RecordWriter(tmp_path) as writer:
                for label in (0, 1, 0):
                    writer.add(label, b"image")

    @pytest.mark.parametrize("label", [-1, 1 << 24, 0.5])
    def test_refuses_labels_float32_cannot_hold(self, tmp_path, label):
        with pytest.raises(ValueError, match="whole numbers from 0"):
            with RecordWriter(tmp_path) as writer:
                writer.add(label, b"image")

    def test_refuses_empty_images(self, tmp_path):
        with pytest.raises(ValueError, match="no bytes"), RecordWriter(tmp_path) as writer:
            writer.add(0, b"")

    def test_overwrites_only_when_asked(self, dataset):
        folder, images = dataset()
        with pytest.raises(FileExistsError, match=r"train\.rec exists"):
            RecordWriter(folder)
        assert contents(Records(folder)) == images
        with RecordWriter(folder, overwrite=True) as writer:
            writer.add(0, b"new")
        assert contents(Records(folder)) == [(0, b"new")]

    def test_failed_overwrite_keeps_the_old_set(self, dataset):
        folder, images = dataset()
        with pytest.raises(RuntimeError), RecordWriter(folder, overwrite=True) as writer:
            writer.add(0, b"new")
            raise RuntimeError
        assert contents(Records(folder)) == images

    def test_too_long_a_record(self, tmp_path):
        class Huge(bytes):
            def __len__(self):
                return 1 << 29

        with open(tmp_path / "file", "wb") as file, pytest.raises(ValueError, match="at most"):
            write_record(file, Huge())


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "images", "classes", "size"),
    [("lfw", 7560, 3238, (112, 112)), ("omniglot", 77120, 3856, (32, 32))],
)
def test_real_sets(real_data, name, images, classes, size):
    records = Records(real_data / name)
    assert records.style == "identity header"
    assert (len(records), records.num_classes) == (images, classes)
    assert records.property == (classes, *size)
    by_image = records.file.headers(records.offsets).label
    assert np.array_equal(records.labels, by_image)
    counts = np.bincount(records.labels)
    if name == "lfw":
        assert (counts >= 3).sum() == 516
    else:
        assert set(counts) == {20}
    reader = mx.recordio.MXIndexedRecordIO(records.path.replace(".rec", ".idx"), records.path, "r")
    for image in (0, 1, images // 2, images - 1):
        header, body = mx.recordio.unpack(reader.read_idx(int(records.keys[image])))
        label, encoded = records.read(image)
        assert (label, encoded.tobytes()) == (header.label, body)


@pytest.mark.parametrize(
    "line", ["0,112,112", "-3,112,112", "99999999999999,112,112", "5,99999,112", "5,112,0"]
)
def test_property_with_numbers_no_dataset_has(tmp_path, line):
    (tmp_path / "property").write_text(line)
    with pytest.raises(ValueError, match=r"property: .* classes of .* pixels: a dataset has 1 to"):
        read_property(str(tmp_path / "property"))
