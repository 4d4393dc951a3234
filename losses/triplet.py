"""Triplet losses, which compare the embeddings of a batch with each other: there are no classes.

A triplet is an anchor, a positive of the same identity, and a negative of another one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Iterator

import numpy as np
from mxnet import nd
from mxnet.gluon.block import HybridBlock

from dsoftmax.losses.criteria import angle_of
from dsoftmax.recognition.common.checks import at_least, whole_number
from dsoftmax.recognition.common.inner_products import inner_products

TITLES = {"triplet": "Triplet", "atriplet": "Triplet on angles"}
DEFAULTS = {"alpha": 0.3, "bag_size": 7200, "images_per_identity": 5, "max_ap": 0.0}
IMAGES = 3  # of a triplet
ANCHORS_AT_ONCE = 256  # whose distances to the whole bag are in memory


class NoSampler:
    """Answers what training asks of a sampler of classes."""

    needs_embeddings = False
    is_sparse = False

    def warn_about(self, batch_size: int) -> None:
        """Warn of nothing."""


@dataclass(frozen=True)
class TripletSpec:
    """A triplet loss with all of its options; stands for a `LossSpec`.

    Attributes
    ----------
    name : str
        A key of `TITLES`.
    options : dict
        ``alpha``, the margin; ``bag_size``, the number of images that triplets are mined from at
        once; ``images_per_identity``, at most, in a bag; ``max_ap``, the largest squared distance
        of anchor and positive, 0 for any.
    """

    name: str
    options: dict[str, Any]
    has_classes = False
    sampler = NoSampler
    sampled_share = None

    @property
    def title(self) -> str:
        """What papers call it."""
        return TITLES[self.name]


def resolve(name: str, options: dict[str, Any]) -> TripletSpec:
    """Check the options of a triplet loss, and add the defaults of the others.

    Raises
    ------
    TypeError
        It has no such option.
    ValueError
        An option is out of range.
    """
    unknown = sorted(set(options) - set(DEFAULTS))
    if unknown:
        raise TypeError(
            f"{name} has no classes and no option {', '.join(unknown)}; legal are "
            f"{', '.join(DEFAULTS)}"
        )
    chosen = {**DEFAULTS, **options}
    for option, value in chosen.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{option} is a number like {DEFAULTS[option]}, not {value!r}")
    at_least("alpha", chosen["alpha"], 0, above=True)
    at_least("max_ap", chosen["max_ap"], 0)
    whole_number("bag_size", chosen["bag_size"], IMAGES)
    whole_number("images_per_identity", chosen["images_per_identity"], 2)
    for option in ("bag_size", "images_per_identity"):
        chosen[option] = int(chosen[option])
    return TripletSpec(name, chosen)


class TripletLoss(HybridBlock):
    """The hinge max(0, δ(a, p) - δ(a, n) + α) of unit vectors a, p and n.

    Parameters
    ----------
    alpha : float
        The margin, usually 0.2 to 0.5.
    on_angles : bool
        Whether δ is the angle of two vectors, or their squared distance.

    Inputs
    ------
    anchors, positives, negatives : (T, D)
        Of any length.

    Outputs
    -------
    loss : (T,)
    to_positives, to_negatives : (T,)
        The cosines of the anchors with the others.

    Examples
    --------
    >>> anchors, others = nd.array([[2.0, 0.0]]), nd.array([[0.0, 1.0]])
    >>> float(TripletLoss(alpha=0.3)(anchors, anchors, others)[0].asscalar())
    0.0
    """

    dissected = False

    def __init__(self, alpha: float, on_angles: bool = False):
        super().__init__(prefix="triplet_")
        self.alpha, self.on_angles = alpha, on_angles

    def hybrid_forward(self, F, anchors, positives, negatives):
        """Return the loss and both cosines of each triplet."""
        anchors, positives, negatives = map(F.L2Normalization, (anchors, positives, negatives))
        to_positives = F.sum(anchors * positives, axis=1)
        to_negatives = F.sum(anchors * negatives, axis=1)
        if self.on_angles:
            difference = angle_of(F, to_positives) - angle_of(F, to_negatives)
        else:
            difference = 2 * (to_negatives - to_positives)  # |a - p|² = 2 - 2 cos(a, p)
        loss = F.relu(difference + self.alpha)
        return loss, F.BlockGrad(to_positives), F.BlockGrad(to_negatives)


class TripletHead:
    """Stands where the `Head` of a loss with classes does, and has no class weights.

    A batch consists of blocks, one per device and micro-batch: the anchors of its triplets, then
    their positives, then their negatives.

    Parameters
    ----------
    spec : TripletSpec
    embedding_size : int
        D.
    block : int
        Images per block.

    Attributes
    ----------
    criterion : TripletLoss
    sampler : NoSampler
    store : NoClasses
    """

    num_classes = 0

    def __init__(self, spec: TripletSpec, embedding_size: int, block: int):
        self.embedding_size = embedding_size
        self.criterion = TripletLoss(spec.options["alpha"], on_angles=spec.name == "atriplet")
        self.criterion.hybridize()
        self.sampler, self.store = NoSampler(), NoClasses(embedding_size)
        self._triplets = block // IMAGES
        self._batches: list[tuple[nd.NDArray, nd.NDArray, nd.NDArray]] = []

    def begin_update(self, labels) -> None:
        """Begin a step, which may have several micro-batches."""
        self._batches = []

    def drop_update(self) -> None:
        """End a step; `stats` still tells about it."""

    def __call__(self, embeddings: nd.NDArray, labels) -> nd.NDArray:
        """Return the loss of each image, (B,): that of its triplet."""
        shape = (-1, IMAGES, self._triplets, self.embedding_size)
        parts = embeddings.reshape(shape).split(IMAGES, axis=1)
        rows = [part.reshape((-1, self.embedding_size)) for part in parts]
        loss, to_positives, to_negatives = self.criterion(*rows)
        self._batches.append((loss, to_positives, to_negatives))
        of_blocks = loss.reshape((-1, 1, self._triplets))
        return nd.broadcast_axis(of_blocks, axis=1, size=IMAGES).reshape(-1)

    def read_loss(self) -> float:
        """Return the mean loss of the step; this waits for the device.

        Raises
        ------
        ValueError
            An embedding is not finite.
        """
        loss, *cosines = self._read()
        if not all(np.isfinite(numbers).all() for numbers in (loss, *cosines)):
            raise ValueError("the loss or an embedding is not finite")
        return float(loss.mean())

    def _read(self) -> list[np.ndarray]:
        return [np.concatenate([part.asnumpy() for part in parts]) for parts in zip(*self._batches)]

    @property
    def stats(self) -> dict[str, float]:
        """Figures of the last step, by the names that a `Head` has for them."""
        _, to_positives, to_negatives = self._read()
        return {
            "accuracy": float((to_positives > to_negatives).mean()),
            "positive_cosine": float(to_positives.mean()),
            "negative_cosine": float(to_negatives.mean()),
            "max_negative_cosine": float(to_negatives.max()),
        }

    def class_weights(self) -> np.ndarray:
        """Return no class weights, (0, D)."""
        return np.zeros(self.store.shape, np.float32)

    def load_class_weights(self, array) -> None:
        """Load nothing."""

    def __repr__(self) -> str:
        return (
            f"{type(self.criterion).__name__}(alpha={self.criterion.alpha:g}, "
            f"{self._triplets} triplets at once, no class weights)"
        )


class NoClasses:
    """Answers what training asks of a store of class weights."""

    def __init__(self, embedding_size: int):
        self.shape = (0, embedding_size)

    def blocks(self) -> Iterator[np.ndarray]:
        """Return no rows."""
        return iter(())

    def all_finite(self) -> bool:
        """Return True."""
        return True

    def assist_reading(self) -> None:
        """Do nothing."""


def pick_triplets(
    embeddings: np.ndarray,
    classes: np.ndarray,
    alpha: float,
    max_ap: float,
    random: np.random.Generator,
) -> np.ndarray:
    """Pick a semi-hard negative for each pair of images of an identity, where there is one.

    It is drawn from the images of other identities that are further from the anchor than the
    positive is, but by less than `alpha`, in squared distance. Pairs without any are left out.

    Parameters
    ----------
    embeddings : (n, D) float32
        Of length 1.
    classes : (n,) int
        The identity of each; those of one follow each other.
    alpha : float
    max_ap : float
        Pairs with a larger squared distance are left out; 0 is any.
    random : Generator

    Returns
    -------
    (T, 3) int64
        Anchor, positive and negative by their rows, in random order.
    """
    ends = np.flatnonzero(np.diff(classes, append=classes[-1] + 1)) + 1
    counts = np.diff(ends, prepend=0)
    start_of, end_of = np.repeat(ends - counts, counts), np.repeat(ends, counts)
    triplets = []
    starts = range(0, len(embeddings), ANCHORS_AT_ONCE)
    blocks = ((embeddings[first : first + ANCHORS_AT_ONCE], embeddings) for first in starts)
    for first, products in zip(starts, inner_products(blocks)):
        for anchor, cosines in enumerate(products, first):
            distances = 2 - 2 * cosines
            to_positives = distances[anchor + 1 : end_of[anchor]].tolist()
            distances[start_of[anchor] : end_of[anchor]] = math.inf
            for positive, distance in enumerate(to_positives, anchor + 1):
                if 0 < max_ap < distance:
                    continue
                (legal,) = np.nonzero((distances > distance) & (distances < distance + alpha))
                if len(legal):
                    triplets.append((anchor, positive, legal[random.integers(len(legal))]))
    found = np.array(triplets, np.int64).reshape(-1, IMAGES)
    return found[random.permutation(len(found))]
