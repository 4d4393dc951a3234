"""Join datasets into one, and leave out identities that they share.

An identity whose centre is near one of an *earlier* dataset is considered the same person.
"""

from __future__ import annotations

import itertools
import os
from typing import Iterator, NamedTuple, Sequence

import numpy as np

from dsoftmax.recognition.common.arrays import map_npy
from dsoftmax.recognition.common.inner_products import inner_products
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.common.vectors import normalized
from dsoftmax.recognition.data.identities import FILE_NAME, write_table
from dsoftmax.recognition.data.records import Records, RecordWriter

ROWS_PER_BLOCK = 4096
CENTRES_PER_BLOCK = 2048  # compared at once


class Identity(NamedTuple):
    """One class of one of the datasets, and whether it is kept."""

    dataset: int  # number of the dataset
    old_label: int
    images: np.ndarray  # numbers of its images in the dataset
    left_out_for: str = ""  # the person it is considered to be; empty if it is kept


def identity_centres(labels: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
    """Average the normalized embeddings of each identity.

    Parameters
    ----------
    labels : (n,) int
    embeddings : (n, D)

    Returns
    -------
    (identities, D) float32
        Normalized, one row per identity in the order of their labels.
    """
    order = np.argsort(labels, kind="stable")
    identities, identity_of_image = np.unique(labels[order], return_inverse=True)
    centres = np.zeros((len(identities), embeddings.shape[1]), np.float32)
    for start in range(0, len(order), ROWS_PER_BLOCK):
        rows = slice(start, start + ROWS_PER_BLOCK)
        present, first_row = np.unique(identity_of_image[rows], return_index=True)
        # An identity may continue in the next block, hence the sum of sums.
        centres[present] += np.add.reduceat(normalized(embeddings[order[rows]]), first_row)
    return normalized(centres)


def nearest(queries: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find each query's nearest among `others`, block by block.

    Parameters
    ----------
    queries : (q, D) float32
    others : (n, D) float32
        Both normalized.

    Returns
    -------
    index, cosine : (q,) int, (q,) float32
    """
    index = np.zeros(len(queries), int)
    best = np.full(len(queries), -np.inf, np.float32)
    starts = list(
        itertools.product(*(range(0, len(rows), CENTRES_PER_BLOCK) for rows in (queries, others)))
    )
    blocks = inner_products(
        (queries[q : q + CENTRES_PER_BLOCK], others[start : start + CENTRES_PER_BLOCK])
        for q, start in starts
    )
    with progress(total=len(queries) * len(others), desc="comparing", unit="pairs") as bar:
        for cosines, (q, start) in zip(blocks, starts):
            rows = slice(q, q + len(cosines))
            places = cosines.argmax(axis=1)
            values = np.take_along_axis(cosines, places[:, None], axis=1)[:, 0]
            better = values > best[rows]
            index[rows][better] = start + places[better]
            best[rows][better] = values[better]
            bar.update(cosines.size)
    return index, best


def select_identities(
    datasets: Sequence[Records],
    names: Sequence[str],
    embeddings: Sequence[np.ndarray] | None = None,
    excluded: np.ndarray | None = None,
    overlap: float = 0.3,
    exclude_overlap: float = 0.4,
) -> list[Identity]:
    """List the identities of all datasets in order, and mark those to leave out.

    Parameters
    ----------
    datasets, names : sequences
        The datasets and their names in the report.
    embeddings : sequence of (images, D) arrays, optional
        One row per image of the respective dataset.
    excluded : (n, D), optional
        Embeddings of people who must not be in the result.
    overlap, exclude_overlap : float
        The cosine from which two identities of different datasets are one person, and from which
        an identity is one of the excluded people.
    """
    identities: list[Identity] = []
    kept_centres: list[np.ndarray] = []
    kept_names: list[str] = []
    for number, (records, name) in enumerate(zip(datasets, names)):
        candidates = list(_identities_of(records, number))
        if embeddings is not None:
            centres = identity_centres(records.labels, embeddings[number])
            if excluded is not None:
                row, cosine = nearest(centres, normalized(excluded))
                people = [f"excluded row {other}" for other in row]
                candidates = _mark(candidates, people, cosine, exclude_overlap)
            if kept_names:
                other, cosine = nearest(centres, np.concatenate(kept_centres))
                people = [kept_names[place] for place in other]
                candidates = _mark(candidates, people, cosine, overlap)
            kept = [place for place, identity in enumerate(candidates) if not identity.left_out_for]
            kept_centres.append(centres[kept])
            kept_names += [f"{name} identity {candidates[place].old_label}" for place in kept]
        identities += candidates
    return identities


def _identities_of(records: Records, number: int) -> Iterator[Identity]:
    order = np.argsort(records.labels, kind="stable")
    labels, starts = np.unique(records.labels[order], return_index=True)
    for label, images in zip(labels, np.split(order, starts[1:])):
        yield Identity(number, int(label), images)


def _mark(
    candidates: list[Identity], people: list[str], cosine, threshold: float
) -> list[Identity]:
    return [
        identity._replace(left_out_for=f"{person} (cosine {value:.3f})")
        if value >= threshold and not identity.left_out_for
        else identity
        for identity, person, value in zip(candidates, people, cosine)
    ]


def merge(
    datasets: Sequence[Records],
    names: Sequence[str],
    identities: Sequence[Identity],
    output: str,
    overwrite: bool = False,
    shuffle_seed: int | None = None,
) -> dict[str, int]:
    """Write the identities that are kept into one dataset.

    Parameters
    ----------
    datasets, names, identities
        See `select_identities`.
    output : str
    shuffle_seed : int, optional
        Write only images, in a random order of this seed, for readers that read a file from
        beginning to end, as MXNet's ``ImageRecordIter`` does.

    Returns
    -------
    dict
        The numbers of ``identities``, ``images`` and ``left_out`` identities.
    """
    sizes = {records.image_size for records in datasets}
    if len(sizes) > 1:
        listed = ", ".join(f"{name} {records.image_size}" for name, records in zip(names, datasets))
        raise ValueError(f"the sets have images of different sizes (height, width): {listed}")
    kept = [identity for identity in identities if not identity.left_out_for]
    if not kept:
        raise ValueError("no identity is left")
    counts = [len(identity.images) for identity in kept]
    labels = np.repeat(np.arange(len(kept)), counts)
    sets = np.repeat([identity.dataset for identity in kept], counts)
    images = np.concatenate([identity.images for identity in kept])
    grouped = shuffle_seed is None
    order = range(len(images))
    if not grouped:
        order = np.random.default_rng(shuffle_seed).permutation(len(images))
    with RecordWriter(output, sizes.pop(), overwrite, identity_header=grouped) as writer:
        for place in progress(order, desc="merging", unit="images"):
            writer.add(int(labels[place]), datasets[sets[place]].read(images[place])[1].tobytes())
    _write_report(datasets, names, identities, os.path.join(output, FILE_NAME))
    return {
        "identities": len(kept),
        "images": len(images),
        "left_out": len(identities) - len(kept),
    }


def _write_report(
    datasets: Sequence[Records], names: Sequence[str], identities: Sequence[Identity], path: str
) -> None:
    labels = itertools.count()
    rows = [
        (
            "" if identity.left_out_for else next(labels),
            datasets[identity.dataset].names.get(identity.old_label, ""),
            names[identity.dataset],
            identity.old_label,
            len(identity.images),
            identity.left_out_for,
        )
        for identity in identities
    ]
    write_table(path, ("label", "name", "dataset", "old_label", "images", "left_out_for"), rows)


def load_embeddings(path: str, rows: int | None = None) -> np.ndarray:
    """Map a ``.npy`` file of embeddings; `rows` is how many it must have."""
    embeddings = map_npy(path)
    if embeddings.ndim != 2 or embeddings.dtype.kind != "f":
        raise ValueError(f"{path}: embeddings are a float array (images, width)")
    if rows is not None and len(embeddings) != rows:
        raise ValueError(f"{path}: {len(embeddings)} rows for a set of {rows} images")
    if not np.isfinite(embeddings).all():
        raise ValueError(f"{path}: some of its numbers are NaN or infinite")
    return embeddings
