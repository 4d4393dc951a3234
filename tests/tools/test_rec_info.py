import json

import cv2
import pytest

from dsoftmax.recognition.data.inspection import find_bad_images
from dsoftmax.recognition.data.records import Records, RecordWriter
from dsoftmax.tools import rec_info


@pytest.fixture
def damaged(tmp_path, jpeg):
    """Seven images of the classes 0, 2 and 5, the second image of class 2 broken."""
    with RecordWriter(tmp_path / "damaged", (32, 32)) as writer:
        for label, count in ((0, 1), (2, 4), (5, 2)):
            for number in range(count):
                image = jpeg()
                writer.add(label, image[:-50] if (label, number) == (2, 1) else image)
    return tmp_path / "damaged"


def test_one_line(dataset, capsys):
    folder, _ = dataset(counts=(3, 1, 4, 2))
    assert rec_info.main(["--input", str(folder)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        f"{folder}/train.rec: 4 identities, 10 images, 1 to 4 an identity (median 2.5, mean 2.50), "
        "0 bad, 0 label gaps, 32x32, identity header"
    )


def test_bad_images_and_gaps(damaged, capsys):
    assert rec_info.main(["--input", str(damaged), "--threads", "3"]) == 0
    output = capsys.readouterr().out
    assert "3 identities, 7 images" in output
    assert "1 bad, 3 label gaps" in output
    assert "2 (key 3): the JPEG has no end marker" in output
    assert "Labels without an image: 1, 3, 4" in output


def test_rebuild_index(dataset, capsys):
    folder, _ = dataset()
    whole = (folder / "train.idx").read_text()
    (folder / "train.idx").write_text(whole[: whole.index("4\t")])
    assert rec_info.main(["--input", str(folder)]) == 2
    assert f"--input {folder}/train.rec --rebuild-index" in capsys.readouterr().err
    assert rec_info.main(["--input", str(folder), "--rebuild-index"]) == 0
    assert "4 identities, 10 images" in capsys.readouterr().out
    assert (folder / "train.idx").read_text() == whole


def test_json(damaged, capsys):
    assert rec_info.main(["--input", str(damaged), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["identities"] == 3
    assert info["images"] == 7
    assert info["num_classes"] == 6
    assert info["label_gaps"] == [1, 3, 4]
    assert info["images_per_identity"]["histogram"] == {"1": 1, "2": 1, "4": 1}
    (bad,) = info["bad_images"]
    assert (bad["image"], bad["key"]) == (2, 3)
    assert bad["offset"] == Records(damaged).offsets[2]


def test_damaged_record_and_wrong_label_are_bad_images(tmp_path, jpeg):
    """Among many, the header says one identity, an image says another."""
    with RecordWriter(tmp_path, (32, 32)) as writer:
        for _ in range(150):
            writer.add(3, jpeg())
    records = Records(tmp_path)
    content = bytearray((tmp_path / "train.rec").read_bytes())
    content[records.offsets[70] + 12 : records.offsets[70] + 16] = b"\0\0\xa0\x40"  # 5.0
    content[records.offsets[140]] ^= 255
    (tmp_path / "train.rec").write_bytes(content)
    bad = find_bad_images(Records(tmp_path), threads=2)
    assert sorted(bad) == [70, 140]
    assert bad[70] == "label 5 among the images of identity 3"
    assert "begins with" in bad[140]


def test_without_decoding(damaged, capsys):
    assert rec_info.main(["--input", str(damaged), "--no-decode"]) == 0
    assert "? bad" in capsys.readouterr().out


@pytest.mark.parametrize("counts", [(1, 2, 2, 5), (1, 1, 3, 60)])
def test_histogram(dataset, tmp_path, counts):
    folder, _ = dataset(counts=counts)
    assert rec_info.main(["--input", str(folder), "--plot", str(tmp_path / "plot.png")]) == 0
    drawn = cv2.imread(str(tmp_path / "plot.png"))
    assert drawn.shape == (800, 1400, 3)
    bars = (drawn == (170, 119, 68)).all(axis=2)  # their colour, in BGR
    assert bars.sum() > 10000


def test_histogram_of_another_format_is_refused(dataset, tmp_path, capsys):
    folder, _ = dataset()
    assert rec_info.main(["--input", str(folder), "--plot", str(tmp_path / "plot.xyz")]) == 2
    assert "must end in .png, .pdf or .svg" in capsys.readouterr().err


def test_property_that_disagrees(dataset, capsys):
    folder, _ = dataset(counts=(2, 2))
    (folder / "property").write_text("9,32,32")
    assert rec_info.main(["--input", str(folder)]) == 0
    assert "property file says 9 classes, the labels end at 1" in capsys.readouterr().out
