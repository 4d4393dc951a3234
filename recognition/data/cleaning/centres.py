"""Centres of identities that wrong images do not move, and how near each image is to its own."""

from __future__ import annotations

from typing import Iterator, NamedTuple

import numpy as np

from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.common.vectors import normalized

ROWS_PER_BLOCK = 4096  # images of whole identities, more only if one identity has more
ITERATIONS = 8  # by then a centre moves by less than 0.01 per iteration
NEAREST = 1e-3  # an image this near to the centre weighs no more than others as near


class Members(NamedTuple):
    """The images of each identity."""

    labels: np.ndarray  # (identities,) int64, ascending
    order: np.ndarray  # (n,) int64, the numbers of all images, one identity after the other
    borders: np.ndarray  # (identities + 1,) int64, where each one's images begin in `order`

    @classmethod
    def of(cls, labels: np.ndarray) -> Members:
        """Group images by their labels, (n,) int."""
        order = np.argsort(labels, kind="stable")
        identities, first = np.unique(labels[order], return_index=True)
        return cls(identities, order, np.append(first, len(order)))

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, identity: int) -> np.ndarray:
        """Return the numbers of an identity's images; `identity` counts from 0, without gaps."""
        return self.order[self.borders[identity] : self.borders[identity + 1]]

    @property
    def counts(self) -> np.ndarray:
        """How many images each identity has, (identities,) int64."""
        return np.diff(self.borders)

    @property
    def identity_of_image(self) -> np.ndarray:
        """The identity of each image, (n,) int64, counted from 0 without gaps."""
        identities = np.empty(len(self.order), np.int64)
        identities[self.order] = np.repeat(np.arange(len(self)), self.counts)
        return identities

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Cut the identities into ranges of about `ROWS_PER_BLOCK` images."""
        start = 0
        while start < len(self):
            room = np.searchsorted(self.borders, self.borders[start] + ROWS_PER_BLOCK, "right") - 1
            stop = max(int(room), start + 1)
            yield start, stop
            start = stop


class Centres(NamedTuple):
    """The centres of all identities, and how near their images are."""

    vectors: np.ndarray  # (identities, D) float32, of length 1
    cosines: np.ndarray  # (n,) float32: of each image with the centre of its identity's *others*


def find_centres(members: Members, embeddings: np.ndarray) -> Centres:
    """Find the geometric median of each identity's embeddings.

    Half of the images may be wrong before it leaves the others. An image is compared with the
    centre of the others, because it would be near to a centre that it is a part of; the only image
    of an identity has a cosine of 1, and one without an embedding 0.

    Parameters
    ----------
    members : Members
    embeddings : (n, D)
        Of any lengths; may be mapped from disk. Images that could not be read have zeros.
    """
    vectors = np.empty((len(members), embeddings.shape[1]), np.float32)
    cosines = np.empty(len(members.order), np.float32)
    with progress(total=len(cosines), desc="finding centres", unit="images") as bar:
        for start, stop in members.blocks():
            images = members.order[members.borders[start] : members.borders[stop]]
            first = members.borders[start:stop] - members.borders[start]
            rows = normalized(np.asarray(embeddings[images], np.float32))
            vectors[start:stop], cosines[images] = _medians(rows, first)
            bar.update(len(images))
    return Centres(vectors, cosines)


def _medians(rows: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the medians of some identities, and the cosines of all of their rows.

    Parameters
    ----------
    rows : (n, D) float32
        Of length 1, or 0.
    first : (identities,) int
        Where the rows of each identity begin.
    """
    counts = np.diff(np.append(first, len(rows)))
    weights = np.ones((len(rows), 1), np.float32)
    for _ in range(ITERATIONS):  # Weiszfeld's: the mean, weighted by 1 / distance
        sums = np.add.reduceat(weights * rows, first)
        means = np.repeat(sums / np.add.reduceat(weights, first), counts, axis=0)
        weights = 1 / np.maximum(np.linalg.norm(rows - means, axis=1, keepdims=True), NEAREST)
    weighted = weights * rows
    sums = np.add.reduceat(weighted, first)
    others = np.repeat(sums, counts, axis=0) - weighted
    cosines = np.einsum("ij,ij->i", rows, normalized(others))
    is_alone = np.repeat(counts, counts) == 1
    return normalized(sums), np.where(is_alone & rows.any(axis=1), 1, cosines)
