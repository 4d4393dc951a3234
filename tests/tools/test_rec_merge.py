import csv

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.recognition.common.vectors import normalized
from dsoftmax.recognition.data import merging
from dsoftmax.recognition.data.merging import identity_centres, nearest
from dsoftmax.recognition.data.records import Records
from dsoftmax.tools import rec_merge


def contents(records):
    return [(label, image.tobytes()) for label, image in map(records.read, range(len(records)))]


def report(folder):
    with open(folder / "identities.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def run(tmp_path):
    def run(*folders, **flags):
        arguments = ["--include", ",".join(map(str, folders)), "--output", str(tmp_path / "joint")]
        for name, value in flags.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        code = rec_merge.main(arguments)
        return code, tmp_path / "joint"

    return run


def test_labels_are_rebased(dataset, run, capsys):
    first, images = dataset(counts=(2, 3), name="first")
    second, others = dataset(counts=(1, 2), name="second", identity_header=False)
    code, joint = run(first, second)
    assert code == 0
    assert "8 images of 4 identities" in capsys.readouterr().out
    records = Records(joint)
    assert records.property == (4, 32, 32)
    assert contents(records) == images + [(label + 2, image) for label, image in others]
    rows = report(joint)
    assert [row["label"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["old_label"] for row in rows] == ["0", "1", "0", "1"]
    assert rows[2]["dataset"] == str(second)


def test_overlapping_identities_are_left_out(dataset, run, tmp_path, rng):
    first, images = dataset(counts=(2, 3, 2), name="first")
    second, others = dataset(counts=(3, 1, 2), name="second")
    people = normalized(rng.normal(size=(5, 64)))

    def embed(path, labels, person_by_label):
        rows = people[[person_by_label[label] for label in labels]]
        rows = rows + 0.3 * normalized(rng.normal(size=rows.shape))
        np.save(path, 7 * rows)  # their length does not matter

    embed(tmp_path / "first.npy", [label for label, _ in images], [0, 1, 2])
    embed(tmp_path / "second.npy", [label for label, _ in others], [3, 1, 4])  # 1 is in both
    np.save(tmp_path / "tests.npy", np.stack([people[2], -people[0]]))
    code, joint = run(
        first,
        second,
        embeddings=f"{tmp_path}/first.npy,{tmp_path}/second.npy",
        exclude=f"{tmp_path}/tests.npy",
        overlap=0.6,
        exclude_overlap=0.6,
    )
    assert code == 0
    rows = report(joint)
    assert [row["label"] for row in rows] == ["0", "1", "", "2", "", "3"]
    assert "excluded row 0 (cosine 0.9" in rows[2]["left_out_for"]
    assert f"{first} identity 1 (cosine 0." in rows[4]["left_out_for"]
    kept = [(label, image) for label, image in images if label != 2]
    kept += [({0: 2, 2: 3}[label], image) for label, image in others if label != 1]
    assert contents(Records(joint)) == kept


def test_a_network_embeds_the_datasets(dataset, run, symbol_model, tmp_path):
    """Both sets are the same here: nobody of the second one is new."""
    (first, images), (second, _) = dataset(name="first"), dataset(name="second")
    for name in ("train.rec", "train.idx"):
        (second / name).write_bytes((first / name).read_bytes())
    code, joint = run(first, second, model=f"{symbol_model()},0", overlap=0.9999)
    assert code == 0
    kept = [row for row in report(joint) if row["label"]]
    assert {row["dataset"] for row in kept} == {str(first)}
    assert contents(Records(joint)) == images
    assert len(list((joint / "embeddings").glob("*/embeddings.npy"))) == 2


def test_centres_and_nearest_against_a_plain_loop(rng, monkeypatch):
    monkeypatch.setattr(merging, "ROWS_PER_BLOCK", 7)  # so that identities span blocks
    monkeypatch.setattr(merging, "CENTRES_PER_BLOCK", 5)
    labels = rng.integers(0, 12, 60) * 3
    embeddings = rng.normal(size=(60, 8)).astype(np.float32)
    centres = identity_centres(labels, embeddings)
    for row, label in enumerate(sorted(set(labels))):
        vectors = [v / np.linalg.norm(v) for v in embeddings[labels == label]]
        mean = np.mean(vectors, axis=0)
        np.testing.assert_allclose(centres[row], mean / np.linalg.norm(mean), atol=1e-5)
    queries = normalized(rng.normal(size=(20, 8)))
    index, cosine = nearest(queries, centres)
    for query, found, value in zip(queries, index, cosine):
        all_cosines = [query @ centre for centre in centres]
        assert found == int(np.argmax(all_cosines))
        assert value == pytest.approx(max(all_cosines), abs=1e-6)


def test_shuffled_for_image_record_iter(dataset, run):
    folder, images = dataset(counts=(4, 4, 4))
    code, joint = run(folder, shuffle=1)
    assert code == 0
    records = Records(joint)
    assert records.style == "plain"
    assert sorted(contents(records)) == sorted(images)
    assert records.labels.tolist() != sorted(records.labels)
    iterator = mx.io.ImageRecordIter(
        path_imgrec=records.path, data_shape=(3, 32, 32), batch_size=6, preprocess_threads=1
    )
    read = np.concatenate([batch.label[0].asnumpy() for batch in iterator])
    assert read.tolist() == records.labels.tolist()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"embeddings": "short.npy,good.npy"}, "2 rows for a set of 10 images"),
        ({"embeddings": "good.npy"}, "1 files for 2 sets"),
        ({"embeddings": "good.npy,narrow.npy"}, "different widths"),
        ({"embeddings": "good.npy,nan.npy"}, "NaN or infinite"),
        ({"embeddings": "good.npy,text.npy"}, "not a .npy file"),
        ({"embeddings": "good.npy,missing.npy"}, "missing.npy"),
        ({"exclude": "good.npy"}, "--exclude needs the --embeddings"),
        ({"embeddings": "good.npy,good.npy", "model": "x,0"}, "either --model or --embeddings"),
    ],
)
def test_bad_embeddings(dataset, run, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    np.save("good.npy", np.ones((10, 4)))
    np.save("short.npy", np.ones((2, 4)))
    np.save("narrow.npy", np.ones((10, 3)))
    np.save("nan.npy", np.full((10, 4), np.nan))
    (tmp_path / "text.npy").write_text("no numbers")
    code, joint = run(dataset(name="a")[0], dataset(name="b")[0], **flags)
    assert code == 2
    assert message in capsys.readouterr().err
    assert not joint.exists()


def test_sets_that_do_not_fit(dataset, run, capsys):
    small, large = dataset(name="a")[0], dataset(name="b", size=(40, 40))[0]
    assert run(small, large)[0] == 2
    assert "different sizes" in capsys.readouterr().err
    assert run(small, small)[0] == 2
    assert "named twice" in capsys.readouterr().err
