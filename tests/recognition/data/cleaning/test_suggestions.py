"""What is suggested for faults that are known."""

import numpy as np
import pytest

from dsoftmax.recognition.common.vectors import normalized
from dsoftmax.recognition.data.cleaning import pairs_of_vectors
from dsoftmax.recognition.data.cleaning.centres import Members
from dsoftmax.recognition.data.cleaning.suggestions import (
    DROP_IMAGE,
    DUPLICATE,
    MERGE,
    OUTLIER,
    SAME_PERSON,
    UNREADABLE,
    Suggestion,
    find_faults,
    find_small,
    read_suggestions,
    write_suggestions,
)
from dsoftmax.recognition.data.images import decode, encode
from dsoftmax.recognition.data.records import Records, RecordWriter

PEOPLE, IMAGES = 30, 6


@pytest.fixture
def faulty(tmp_path, jpeg, rng):
    """Write a dataset with one fault of each kind; return it and its embeddings.

    Image 3, of person 0, shows person 7. Labels 5 and 30 are one person. Image 14 is a copy of 13,
    and image 50, of person 8, one of image 20, of person 3. Image 100 is cut off.
    """
    labels = np.repeat(np.arange(PEOPLE + 1), IMAGES)
    person = np.where(labels == PEOPLE, 5, labels)
    person[3], person[50] = 7, 3
    centres = normalized(rng.normal(size=(PEOPLE, 128)))
    embeddings = centres[person] + 0.5 * normalized(rng.normal(size=(len(labels), 128)))
    pictures = [jpeg(64, 64) for _ in labels]
    for copy, original in ((14, 13), (50, 20)):
        image = decode(np.frombuffer(pictures[original], np.uint8))
        pictures[copy] = encode(image, quality=70)
        embeddings[copy] = embeddings[original] + 0.01
    pictures[100] = pictures[100][:-20]
    embeddings[100] = 0
    with RecordWriter(tmp_path / "faulty", (64, 64)) as writer:
        for label, picture in zip(labels.tolist(), pictures):
            writer.add(label, picture)
    return Records(tmp_path / "faulty"), embeddings.astype(np.float32)


def test_each_planted_fault_is_found_and_nothing_else(faulty):
    findings = find_faults(*faulty)
    found = {reason: [] for reason in (OUTLIER, SAME_PERSON, DUPLICATE, UNREADABLE)}
    for suggestion in findings.suggestions:
        found[suggestion.reason].append(suggestion)
    outliers = {one.image: one.other_label for one in found[OUTLIER]}
    assert outliers == {3: 7, 50: 3}
    (same,) = found[SAME_PERSON]
    assert (same.action, {same.label, same.other_label}) == (MERGE, {5, 30})
    assert same.cosine > findings.thresholds.same_person
    first, second = found[DUPLICATE]
    assert (first.image, first.label, first.other_image, first.other_label) == (50, 8, 20, 3)
    assert {second.image, second.other_image} == {13, 14}
    assert [one.image for one in found[UNREADABLE]] == [100]


def test_thresholds_can_be_given(faulty, monkeypatch):
    findings = find_faults(*faulty, outlier=-1.0, same_person=1.1)
    assert {one.reason for one in findings.suggestions} == {DUPLICATE, UNREADABLE}
    monkeypatch.setattr(pairs_of_vectors, "MOST_PAIRS_PER_VECTOR", 2)
    with pytest.raises(ValueError, match="raise --same-person-threshold"):
        find_faults(*faulty, same_person=-1.0)


def test_embeddings_that_tell_nothing_are_warned_of(faulty, rng):
    records, embeddings = faulty
    assert find_faults(records, embeddings).warning == ""
    noise = rng.normal(size=embeddings.shape).astype(np.float32)
    assert "of the images would be outliers" in find_faults(records, noise).warning


def test_of_two_images_nobody_knows_which_one_is_wrong(dataset):
    folder, _ = dataset(counts=(2, 2, 2))
    embeddings = np.eye(6, dtype=np.float32)
    findings = find_faults(Records(folder), embeddings, outlier=0.5, same_person=0.9)
    assert findings.suggestions == []


def test_small_identities_are_counted_after_other_changes():
    members = Members.of(np.array([0, 0, 1, 2, 2, 3]))
    changes = [
        Suggestion(DROP_IMAGE, OUTLIER, 0, image=1),
        Suggestion(DROP_IMAGE, DUPLICATE, 0, image=1),  # the same image is dropped once
        Suggestion(MERGE, SAME_PERSON, 3, other_label=1),
    ]
    assert [one.label for one in find_small(members, {}, [], 2)] == [1, 3]
    (small,) = find_small(members, {0: "Ann"}, changes, 2)
    assert (small.label, small.name) == (0, "Ann")


def test_a_list_is_read_as_it_was_written(tmp_path, faulty):
    records, embeddings = faulty
    suggestions = find_faults(records, embeddings).suggestions
    write_suggestions(tmp_path / "list.csv", suggestions)
    read = read_suggestions(tmp_path / "list.csv", records.labels)
    columns = ("action", "reason", "label", "image", "other_label")
    for one, other in zip(suggestions, read):
        assert [getattr(one, name) for name in columns] == [
            getattr(other, name) for name in columns
        ]
    assert len(suggestions) == len(read)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("delete,,0,1,", "line 2: the action is 'delete', not one of drop image, merge"),
        ("drop image,,0,2,", "image '2' is no image of label 0"),
        ("drop image,,0,,", "image '' is no image of label 0"),
        ("drop image,,0,99,", "image '99' is no image of label 0"),
        ("drop image,,x,0,", "label must be a whole number, not 'x'"),
        ("drop identity,,7,,", "the dataset has no label '7'"),
        ("merge,,0,,9", "label 0 can't be merged with '9'"),
        ("merge,,0,,0", "label 0 can't be merged with '0'"),
        ("", "there is nothing to carry out"),
    ],
)
def test_what_is_wrong_with_a_list(tmp_path, line, message):
    path = tmp_path / "list.csv"
    path.write_text(f"action,reason,label,image,other_label\n{line}\n")
    with pytest.raises(ValueError, match=r"list\.csv") as error:
        read_suggestions(path, np.array([0, 0, 1]))
    assert message in str(error.value)
