"""Write a dataset with the changes that a list of suggestions asks for."""

from __future__ import annotations

from typing import Iterable, Iterator

import numpy as np

from dsoftmax.recognition.data.cleaning.centres import Members
from dsoftmax.recognition.data.cleaning.suggestions import (
    DROP_IDENTITY,
    DROP_IMAGE,
    MERGE,
    Suggestion,
)
from dsoftmax.recognition.data.merging import Identity, merge
from dsoftmax.recognition.data.records import Records


def changed_identities(labels: np.ndarray, changes: Iterable[Suggestion]) -> Iterator[Identity]:
    """Yield all identities of a dataset, in the order of their labels, as changes leave them.

    Parameters
    ----------
    labels : (n,) int
    changes : iterable of Suggestion
        An identity that is merged into one that is itself merged ends up with the last of them. An
        identity that is to be dropped is dropped with all that is merged into it.
    """
    dropped_images, dropped, merged = set(), {}, {}
    for change in changes:
        if change.action == DROP_IMAGE:
            dropped_images.add(change.image)
        elif change.action == DROP_IDENTITY:
            dropped[change.label] = change.reason or "dropped"
        elif change.action == MERGE:
            merged[change.label] = change.other_label
    final = {label: _end_of_chain(label, merged) for label in merged}
    members = Members.of(labels)
    kept: dict[int, list[np.ndarray]] = {}
    for number, label in enumerate(members.labels.tolist()):
        images = members.images(number)
        kept.setdefault(final.get(label, label), []).append(
            images[[image not in dropped_images for image in images.tolist()]]
        )
    for label in members.labels.tolist():
        if label in final:
            yield Identity(0, label, np.empty(0, int), f"merged into {final[label]}")
            continue
        images = np.concatenate(kept[label])
        reason = dropped.get(label, "" if len(images) else "no image is left")
        yield Identity(0, label, images, reason)


def _end_of_chain(label: int, merged: dict[int, int]) -> int:
    passed = [label]
    while passed[-1] in merged:
        passed.append(merged[passed[-1]])
        if passed[-1] == label:
            listed = " into ".join(map(str, passed))
            raise ValueError(f"identities are merged in a circle: {listed}")
        if passed.count(passed[-1]) > 1:
            break  # a circle further on, which its own members report
    return passed[-1]


def carry_out(
    records: Records,
    name: str,
    changes: Iterable[Suggestion],
    output: str,
    overwrite: bool = False,
) -> dict[str, int]:
    """Write a changed dataset; labels are numbered anew, and ``identities.csv`` says how.

    Returns
    -------
    dict
        The numbers of ``identities``, ``images`` and ``left_out`` identities.
    """
    identities = list(changed_identities(records.labels, changes))
    return merge([records], [name], identities, output, overwrite)
