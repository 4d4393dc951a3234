"""Plant faults in a dataset, and measure which of them were found."""

from __future__ import annotations

import csv
from typing import NamedTuple

import numpy as np

from dsoftmax.recognition.data.images import decode, encode
from dsoftmax.recognition.data.records import Records, RecordWriter

QUALITIES = (50, 95)  # of JPEG copies


class Planted(NamedTuple):
    """The faults of a dataset; images by their numbers in it."""

    wrong_labels: set[int]
    copies: set[frozenset[int]]
    split: set[frozenset[int]]  # pairs of labels


def plant_faults(
    records: Records,
    folder,
    rng: np.random.Generator,
    wrong_share: float = 0.02,
    copied_share: float = 0.02,
    split_share: float = 0.1,
    fewest: int = 3,
) -> Planted:
    """Write the identities with `fewest` images or more into a folder, with faults.

    A share of the images gets the label of a random other identity, another one is copied at a
    lower quality, half of the copies under another label. A share of the identities is split.
    """
    labels = records.labels
    usable = np.flatnonzero(np.bincount(labels) >= fewest)
    members = {label: np.flatnonzero(labels == label).tolist() for label in usable.tolist()}
    images = [(image, label) for label in members for image in members[label]]
    count = len(images)
    chosen = rng.permutation(count)
    moved = set(chosen[: round(wrong_share * count)].tolist())
    copied = chosen[len(moved) : len(moved) + round(copied_share * count)].tolist()
    large = [label for label in members if len(members[label]) >= 2 * fewest]
    split = rng.permutation(large)[: round(split_share * len(large))].tolist()
    second_half = {label: len(labels) + place for place, label in enumerate(split)}

    def another(label: int) -> int:
        return int(rng.choice([other for other in members if other != label]))

    entries = []  # (label, source, is wrong, bytes)
    for place, (image, label) in enumerate(images):
        encoded = records.read(image)[1]
        if place in moved:
            entries.append((another(label), place, True, encoded.tobytes()))
            continue
        if label in second_half and members[label].index(image) % 2:
            label = second_half[label]
        entries.append((label, place, False, encoded.tobytes()))
        if place in copied:
            is_wrong = bool(rng.integers(2))
            poor = encode(decode(encoded), quality=int(rng.integers(*QUALITIES)))
            entries.append((another(label) if is_wrong else label, place, is_wrong, poor))
    entries.sort(key=lambda entry: entry[0])
    renumbered = {old: new for new, old in enumerate(sorted({entry[0] for entry in entries}))}
    first_place: dict[int, int] = {}
    wrong, copies = set(), set()
    with RecordWriter(folder, records.image_size) as writer:
        for number, (label, source, is_wrong, encoded) in enumerate(entries):
            writer.add(renumbered[label], encoded)
            if is_wrong:
                wrong.add(number)
            if source in first_place:
                copies.add(frozenset((first_place[source], number)))
            first_place[source] = number
    pairs = {
        frozenset((renumbered[label], renumbered[other])) for label, other in second_half.items()
    }
    return Planted(wrong, copies, pairs)


def precision_and_recall(found: set, planted: set) -> tuple[float, float]:
    """Return the share of what was found that is planted, and of what is planted that was found."""
    right = len(found & planted)
    return right / max(len(found), 1), right / max(len(planted), 1)


def judge(list_path, planted: Planted) -> dict[str, tuple[float, float]]:
    """Return precision and recall by reason, of a list of suggestions."""
    with open(list_path, newline="") as file:
        rows = list(csv.DictReader(file))

    def found(reason: str, make) -> set:
        return {make(row) for row in rows if row["reason"] == reason}

    return {
        "outlier": precision_and_recall(
            found("outlier", lambda row: int(row["image"])), planted.wrong_labels
        ),
        "duplicate": precision_and_recall(
            found("duplicate", lambda row: frozenset((int(row["image"]), int(row["other_image"])))),
            planted.copies,
        ),
        "same person": precision_and_recall(
            found(
                "same person", lambda row: frozenset((int(row["label"]), int(row["other_label"])))
            ),
            planted.split,
        ),
    }
