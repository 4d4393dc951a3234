"""What changes leave of a dataset."""

import csv

import numpy as np
import pytest

from dsoftmax.recognition.data.cleaning.carrying_out import carry_out, changed_identities
from dsoftmax.recognition.data.cleaning.suggestions import (
    DROP_IDENTITY,
    DROP_IMAGE,
    MERGE,
    Suggestion,
)
from dsoftmax.recognition.data.records import Records

LABELS = np.array([0, 0, 1, 2, 2, 2, 5])


def left(*changes):
    return [
        (identity.old_label, identity.images.tolist(), identity.left_out_for)
        for identity in changed_identities(LABELS, changes)
    ]


def merged(label, other):
    return Suggestion(MERGE, "", label, other_label=other)


def test_images_and_identities_are_dropped():
    assert left(
        Suggestion(DROP_IMAGE, "", 0, image=1),
        Suggestion(DROP_IMAGE, "", 1, image=2),
        Suggestion(DROP_IDENTITY, "few images", 5),
    ) == [
        (0, [0], ""),
        (1, [], "no image is left"),
        (2, [3, 4, 5], ""),
        (5, [6], "few images"),
    ]


def test_identities_are_merged_along_a_chain():
    assert left(merged(1, 2), merged(2, 5), Suggestion(DROP_IMAGE, "", 2, image=4)) == [
        (0, [0, 1], ""),
        (1, [], "merged into 5"),
        (2, [], "merged into 5"),
        (5, [2, 3, 5, 6], ""),
    ]


def test_a_circle_is_refused():
    with pytest.raises(ValueError, match=r"in a circle: (1 into 2 into 1|2 into 1 into 2)"):
        left(merged(0, 1), merged(1, 2), merged(2, 1))


def test_a_dataset_is_written_with_new_labels(dataset, tmp_path):
    folder, images = dataset(counts=(2, 1, 3))
    (folder / "identities.csv").write_text("label,name,images\n0,Ann,2\n1,Bo,1\n2,Cy,3\n")
    changes = [merged(1, 2), Suggestion(DROP_IMAGE, "copy", 0, image=0)]
    done = carry_out(Records(folder), "faces", changes, str(tmp_path / "cleaned"))
    assert done == {"identities": 2, "images": 5, "left_out": 1}
    cleaned = Records(tmp_path / "cleaned")
    assert cleaned.labels.tolist() == [0, 1, 1, 1, 1]
    assert cleaned.names == {0: "Ann", 1: "Cy"}
    contents = [cleaned.read(image)[1].tobytes() for image in range(5)]
    assert contents == [images[place][1] for place in (1, 2, 3, 4, 5)]
    with open(tmp_path / "cleaned" / "identities.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["label"], row["old_label"], row["left_out_for"]) for row in rows] == [
        ("0", "0", ""),
        ("", "1", "merged into 2"),
        ("1", "2", ""),
    ]
