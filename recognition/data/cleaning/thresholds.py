"""Thresholds on cosines that fit a network: what it says of strangers, and of one person.

The cosines of two networks are not comparable, so the dataset itself decides. Most of its labels
are right; which ones does not matter here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dsoftmax.recognition.common.vectors import normalized
from dsoftmax.recognition.data.cleaning.centres import Centres, Members

DEVIATIONS = 2.326  # 1 % of normal numbers are further above their mean
HALVES = 0.05  # the share of identities whose halves may be further apart than one person's
FEWEST_OF_HALF = 2  # images
SAMPLED_IMAGES, SAMPLED_IDENTITIES = 4096, 2048
FEWEST_HALVED = 20  # identities, for a quantile that means something
USUAL_SAME_PERSON = 0.7  # where too few identities have enough images to be halved


def _centre_and_spread(cosines: np.ndarray) -> tuple[float, float]:
    """Return what mean and standard deviation of normal numbers are.

    By median and absolute deviation: of a few identities some pairs may be one person.
    """
    median = np.median(cosines)
    return float(median), float(1.4826 * np.median(np.abs(cosines - median)))


def nearest_strangers(cosines: np.ndarray, pairs: float) -> float:
    """Expect the highest cosine of so many pairs of strangers, from a sample of them.

    Cosines of random directions in d dimensions have a spread of 1 / sqrt(d), and one of N exceeds
    about sqrt(1 - N^(-2 / (d - 1))): below 1, which normal numbers would pass.
    """
    centre, spread = _centre_and_spread(cosines)
    dimensions = max(1 / max(spread, 1e-6) ** 2, 2.0)
    return centre + math.sqrt(1 - max(pairs, 2.0) ** (-2 / (dimensions - 1)))


class Thresholds(NamedTuple):
    """The cosines from which suggestions are made."""

    outlier: float  # below: the image does not belong to its identity
    same_person: float  # from it on: two identities are one person


class Samples(NamedTuple):
    """Cosines of a sample of the dataset, of which thresholds are made."""

    strangers: np.ndarray  # (m,), of images with the centres of other identities
    strange_centres: np.ndarray  # (m,), of the centres of different identities
    halves: np.ndarray  # (m,), of the centres of two halves of one identity, without outliers

    @property
    def outlier(self) -> float:
        """The cosine that few strangers reach."""
        centre, spread = _centre_and_spread(self.strangers)
        return centre + DEVIATIONS * spread


def sample_cosines(
    members: Members, embeddings: np.ndarray, centres: Centres, seed: int = 0
) -> Samples:
    """Compare images with strangers, identities with each other, and halves of identities.

    Parameters
    ----------
    members : Members
    embeddings : (n, D)
    centres : Centres
    seed : int
    """
    random = np.random.default_rng(seed)
    people = random.permutation(len(members))[:SAMPLED_IDENTITIES]
    images = random.permutation(len(members.order))[:SAMPLED_IMAGES]
    identity_of_image = members.identity_of_image[images]
    vectors = centres.vectors[people]
    of_images = normalized(np.asarray(embeddings[images], np.float32)) @ vectors.T
    of_centres = vectors @ vectors.T
    strangers = of_images[identity_of_image[:, None] != people]
    if not len(strangers):
        raise ValueError("all images are of one identity: there is nobody to compare them with")
    samples = Samples(
        strangers, of_centres[~np.eye(len(people), dtype=bool)], np.empty(0, np.float32)
    )
    is_sound = centres.cosines > samples.outlier
    return samples._replace(halves=_halves(members, embeddings, is_sound, random))


def _halves(
    members: Members, embeddings: np.ndarray, is_sound: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Return the cosines of the centres of two random halves of identities, (m,)."""
    large = np.flatnonzero(members.counts >= 2 * FEWEST_OF_HALF)
    cosines = []
    for identity in random.permutation(large)[:SAMPLED_IDENTITIES]:
        images = random.permutation(members.images(identity))
        images = images[is_sound[images]]
        if len(images) < 2 * FEWEST_OF_HALF:
            continue
        rows = normalized(np.asarray(embeddings[images], np.float32))
        half = len(rows) // 2
        one, other = (part.sum(axis=0) for part in (rows[:half], rows[half:]))
        cosines.append(float(one @ other / np.linalg.norm(one) / np.linalg.norm(other)))
    return np.array(cosines, np.float32)


def choose_thresholds(samples: Samples, identities: int) -> Thresholds:
    """Choose thresholds that fit the network.

    An image is an outlier if it is no nearer to its identity than 1 % of strangers are: so 99 % of
    the images under the name of a random other person are found. Two identities are one person if
    they are as near as the halves of 95 % of the identities are (`HALVES`), and nearer than the
    nearest of all pairs of strangers should be (`nearest_strangers`).

    Parameters
    ----------
    samples : Samples
    identities : int
        How many the dataset has.
    """
    pairs = identities * (identities - 1) / 2
    same_person = nearest_strangers(samples.strange_centres, pairs)
    if len(samples.halves) >= FEWEST_HALVED:
        same_person = max(same_person, float(np.quantile(samples.halves, HALVES)))
    else:
        same_person = max(same_person, USUAL_SAME_PERSON)
    return Thresholds(samples.outlier, min(same_person, 1.0))
