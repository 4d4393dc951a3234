"""What to change in a dataset and why: a list that people read, edit and have carried out."""

from __future__ import annotations

import itertools
from typing import Iterable, NamedTuple, Sequence

import numpy as np

from dsoftmax.recognition.common.vectors import normalized
from dsoftmax.recognition.data.cleaning.centres import Centres, Members, find_centres
from dsoftmax.recognition.data.cleaning.duplicates import hash_images, near_hashes
from dsoftmax.recognition.data.cleaning.pairs_of_vectors import (
    TooManyPairsError,
    absorb,
    near_pairs,
)
from dsoftmax.recognition.data.cleaning.thresholds import (
    Samples,
    Thresholds,
    choose_thresholds,
    sample_cosines,
)
from dsoftmax.recognition.data.identities import read_table, write_table
from dsoftmax.recognition.data.merging import nearest
from dsoftmax.recognition.data.records import Records

OUTLIER, DUPLICATE, SAME_PERSON, FEW_IMAGES, UNREADABLE = REASONS = (
    "outlier",
    "duplicate",
    "same person",
    "few images",
    "unreadable",
)
DROP_IMAGE, MERGE, DROP_IDENTITY = ACTIONS = ("drop image", "merge", "drop identity")
FEWEST_TO_DECIDE = 3  # images: of two that differ nobody knows which one is wrong
MOST_OUTLIERS = 0.1  # the share of images; a dataset with more wrong labels is not to be cleaned
DUPLICATE_COSINE = 0.9  # that copies reach, too; a hash alone may be equal for blank images


class Suggestion(NamedTuple):
    """One change to a dataset; the columns of the list.

    An image of `label` is dropped, or all images of `label` become images of `other_label`, or they
    are all dropped. `cosine` is that with the rest of the identity, the copy that is kept, or the
    other identity.
    """

    action: str
    reason: str
    label: int
    name: str = ""
    image: int | None = None
    cosine: float | None = None
    other_label: int | None = None
    other_name: str = ""
    other_image: int | None = None
    other_cosine: float | None = None  # of an outlier with the identity it is nearest to


class Findings(NamedTuple):
    """All suggestions for a dataset, and what they were made of."""

    suggestions: list[Suggestion]  # by reason, the worst first
    thresholds: Thresholds
    samples: Samples
    members: Members
    centres: Centres

    @property
    def warning(self) -> str:
        """Why the suggestions should not be trusted; empty if they can be."""
        outliers = sum(suggestion.reason == OUTLIER for suggestion in self.suggestions)
        share = outliers / len(self.members.order)
        if share <= MOST_OUTLIERS:
            return ""
        return (
            f"{share:.0%} of the images would be outliers: the embeddings hardly tell these people "
            "apart; take a network that was trained on such faces"
        )


def find_faults(
    records: Records,
    embeddings: np.ndarray,
    outlier: float | None = None,
    same_person: float | None = None,
    threads: int = 1,
) -> Findings:
    """Look for outliers, identities of one person, copies and unreadable images.

    Parameters
    ----------
    records : Records
    embeddings : (n, D)
        One row per image; may be mapped from disk.
    outlier, same_person : float, optional
        Thresholds; by default `choose_thresholds` chooses.
    threads : int
        That decode images.
    """
    members = Members.of(records.labels)
    centres = find_centres(members, embeddings)
    samples = sample_cosines(members, embeddings, centres)
    thresholds = choose_thresholds(samples, len(members))
    if outlier is not None:
        thresholds = thresholds._replace(outlier=outlier)
    if same_person is not None:
        thresholds = thresholds._replace(same_person=same_person)
    hashes, unreadable = hash_images(records, threads)
    finder = _Finder(records.names, members, embeddings, centres)
    suggestions = [
        *finder.outliers(thresholds.outlier, set(unreadable)),
        *finder.same_people(thresholds.same_person),
        *finder.duplicates(near_hashes(hashes), set(unreadable)),
        *finder.unreadable(unreadable),
    ]
    return Findings(suggestions, thresholds, samples, members, centres)


class _Finder:
    """Makes suggestions of what was measured."""

    def __init__(
        self, names: dict[int, str], members: Members, embeddings: np.ndarray, centres: Centres
    ):
        self._names, self._members = names, members
        self._embeddings, self._centres = embeddings, centres
        self._identity_of_image = members.identity_of_image

    def _label(self, identity: int) -> tuple[int, str]:
        label = int(self._members.labels[identity])
        return label, self._names.get(label, "")

    def outliers(self, threshold: float, unreadable: set[int]) -> list[Suggestion]:
        cosines = self._centres.cosines
        is_decidable = self._members.counts[self._identity_of_image] >= FEWEST_TO_DECIDE
        images = np.flatnonzero((cosines < threshold) & is_decidable)
        images = images[np.argsort(cosines[images], kind="stable")]
        images = np.array([image for image in images if image not in unreadable], int)
        if not len(images):
            return []
        others, other_cosines = self._nearest_others(images)
        return [
            Suggestion(
                DROP_IMAGE,
                OUTLIER,
                *self._label(self._identity_of_image[image]),
                int(image),
                float(cosines[image]),
                *self._label(other),
                other_cosine=float(cosine),
            )
            for image, other, cosine in zip(images, others, other_cosines)
        ]

    def _nearest_others(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the identity that each image is nearest to, and its cosine."""
        rows = normalized(np.asarray(self._embeddings[images], np.float32))
        return nearest(rows, self._centres.vectors)

    def same_people(self, threshold: float) -> list[Suggestion]:
        try:
            pairs, cosines = near_pairs(self._centres.vectors, threshold)
        except TooManyPairsError as error:
            raise ValueError(f"{error}: raise --same-person-threshold") from None
        cosine_of = {tuple(pair): float(value) for pair, value in zip(pairs.tolist(), cosines)}
        taken = absorb(pairs, -self._members.counts)  # the largest identity takes in the others
        suggestions = [
            Suggestion(
                MERGE,
                SAME_PERSON,
                *self._label(one),
                None,
                cosine_of[min(one, other), max(one, other)],
                *self._label(other),
            )
            for one, other in taken.items()
        ]
        return sorted(suggestions, key=lambda suggestion: -suggestion.cosine)

    def duplicates(self, pairs: np.ndarray, unreadable: set[int]) -> list[Suggestion]:
        pairs = np.array([pair for pair in pairs.tolist() if not unreadable & {*pair}], int)
        if not len(pairs):
            return []
        one, other = (
            normalized(np.asarray(self._embeddings[side], np.float32)) for side in pairs.T
        )
        cosines = np.einsum("ij,ij->i", one, other)
        pairs, cosines = pairs[cosines >= DUPLICATE_COSINE], cosines[cosines >= DUPLICATE_COSINE]
        cosine_of = {tuple(pair): float(value) for pair, value in zip(pairs.tolist(), cosines)}
        taken = absorb(pairs, -self._centres.cosines)  # the copy in the right place stays
        suggestions = [
            Suggestion(
                DROP_IMAGE,
                DUPLICATE,
                *self._label(self._identity_of_image[image]),
                image,
                cosine_of[min(image, kept), max(image, kept)],
                *self._label(self._identity_of_image[kept]),
                kept,
            )
            for image, kept in taken.items()
        ]
        # Copies under two names come first: one of the names is wrong.
        return sorted(suggestions, key=lambda s: (s.label == s.other_label, -s.cosine))

    def unreadable(self, why: dict[int, str]) -> list[Suggestion]:
        return [
            Suggestion(DROP_IMAGE, UNREADABLE, *self._label(self._identity_of_image[image]), image)
            for image in sorted(why)
        ]


def find_small(
    members: Members, names: dict[int, str], changes: Iterable[Suggestion], min_images: int
) -> list[Suggestion]:
    """Suggest to drop the identities that other changes leave with fewer than `min_images`."""
    counts = dict(zip(members.labels.tolist(), members.counts.tolist()))
    dropped = {change.image: change.label for change in changes if change.action == DROP_IMAGE}
    for label in dropped.values():
        counts[label] -= 1
    for change in changes:
        if change.action == MERGE:
            counts[change.other_label] += counts.pop(change.label)
    return [
        Suggestion(DROP_IDENTITY, FEW_IMAGES, label, names.get(label, ""))
        for label, count in sorted(counts.items())
        if count < min_images
    ]


def write_suggestions(path: str, suggestions: Sequence[Suggestion]) -> None:
    """Write a list of suggestions as csv."""
    write_table(
        path,
        Suggestion._fields,
        (
            [f"{value:.4f}" if isinstance(value, float) else value for value in suggestion]
            for suggestion in suggestions
        ),
    )


def write_cosines(path: str, findings: Findings) -> None:
    """Write the cosine of every image with its identity's others as csv, in the dataset's order."""
    members = findings.members
    labels = members.labels[members.identity_of_image].tolist()
    cosines = (f"{cosine:.4f}" for cosine in findings.centres.cosines)
    write_table(path, ("image", "label", "cosine"), zip(itertools.count(), labels, cosines))


def read_suggestions(path: str, labels: np.ndarray) -> list[Suggestion]:
    """Read a list of suggestions that a user may have edited.

    Parameters
    ----------
    path : str
        A csv file. Its columns ``action``, ``label``, ``image`` and ``other_label`` count.
    labels : (n,) int
        Of the dataset that the list is for.
    """
    known = set(np.unique(labels).tolist())
    suggestions = []
    for number, row in enumerate(read_table(path), 2):

        def refuse(what: str, number: int = number) -> None:
            raise ValueError(f"{path}: line {number}: {what}")

        action = row.get("action") or ""
        if action not in ACTIONS:
            refuse(f"the action is {action!r}, not one of {', '.join(ACTIONS)}")
        values = {}
        for column in ("label", "image", "other_label"):
            text = row.get(column) or ""
            if text and not text.isdecimal():
                refuse(f"{column} must be a whole number, not {text!r}")
            values[column] = int(text) if text else None
        label, image, other = values.values()
        if label not in known:
            refuse(f"the dataset has no label {row.get('label')!r}")
        if action == DROP_IMAGE and not (
            image is not None and image < len(labels) and labels[image] == label
        ):
            refuse(f"image {row.get('image')!r} is no image of label {label}: another dataset's?")
        if action == MERGE and (other not in known or other == label):
            refuse(f"label {label} can't be merged with {row.get('other_label')!r}")
        suggestions.append(
            Suggestion(action, row.get("reason") or "", label, image=image, other_label=other)
        )
    if not suggestions:
        raise ValueError(f"{path}: there is nothing to carry out; columns are action, label, ...")
    return suggestions
