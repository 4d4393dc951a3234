"""Bags of images, a few of each identity, from which triplets are mined."""

from __future__ import annotations

import numpy as np


class Bags:
    """Numbered bags of images, each a function of the seed and its number alone.

    A pass shuffles the identities, takes up to some images of each, drawn at random, and cuts their
    sequence into bags; what is left at its end is too small for one. The next pass shuffles anew.

    Parameters
    ----------
    classes : (n,) int
        The identity of each image.
    images_per_identity : int
        The largest number of images of an identity per pass. Identities with a single image are in
        the bags, too: as negatives.
    size : int
        Images per bag; all of a pass, if these are fewer.
    seed : int

    Attributes
    ----------
    size : int
    per_pass : int
        Bags per pass.

    Examples
    --------
    >>> bags = Bags([0, 0, 0, 1, 1, 2], images_per_identity=2, size=4)
    >>> bags.draw(0).shape, bags.per_pass
    ((4,), 1)
    """

    def __init__(self, classes: np.ndarray, images_per_identity: int, size: int, seed: int = 0):
        self._classes = np.asarray(classes)
        self._most, self._seed = images_per_identity, seed
        per_pass = int(np.minimum(np.bincount(self._classes), images_per_identity).sum())
        self.size = min(size, per_pass)
        self.per_pass = per_pass // self.size
        self._pass: tuple[int, np.ndarray] = -1, np.empty(0, np.int64)

    def draw(self, number: int) -> np.ndarray:
        """Return the images of a bag, (size,) int64; those of an identity follow each other."""
        sequence_number, place = divmod(number, self.per_pass)
        if self._pass[0] != sequence_number:
            self._pass = sequence_number, self._sequence(sequence_number)
        return self._pass[1][place * self.size : (place + 1) * self.size]

    def generator(self, number: int, stream: int) -> np.random.Generator:
        """Return random numbers of a pass (stream 2) or of a bag (stream 3).

        The streams 0 and 1 of a seed are those of `Pipeline`.
        """
        counter = [0, stream, 0, 0]
        return np.random.Generator(np.random.Philox(key=[self._seed, number], counter=counter))

    def _sequence(self, number: int) -> np.ndarray:
        random = self.generator(number, stream=2)
        places = random.permutation(int(self._classes.max()) + 1)[self._classes]
        order = np.lexsort((random.random(len(places)), places))
        sorted_places = places[order]
        first_of_identity = np.searchsorted(sorted_places, sorted_places)
        return order[np.arange(len(order)) - first_of_identity < self._most]
