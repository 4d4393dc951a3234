"""Which negatives enter n: all classes, random classes, or all classes for random samples.

A draw is a function of (seed, step) and the batch's labels, the same for all devices: each device
takes the classes of its shard. So results do not depend on how many devices there are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from dsoftmax.losses.stores.base import ClassStore

PAPER_RATE = 1 / 64  # the paper's, and the default
EXCLUDED, COUNTED, ADDED = BATCH_CLASSES = ("excluded", "counted", "added")


class SamplerSetting(NamedTuple):
    """What a head tells its sampler, beside the sampler's options."""

    store: ClassStore
    dissected: bool  # whether the criterion treats intra-class and inter-class parts separately
    normalize: bool  # cosines, or plain inner products
    seed: int

    @property
    def usual_batch_classes(self) -> str:
        """What the classes of a batch are to the negatives, unless an option says otherwise."""
        return EXCLUDED if self.dissected else COUNTED


class Draw(NamedTuple):
    """The negatives of one step."""

    # Classes whose weights are negatives, sorted, none of them a label of the batch; None for all.
    classes: np.ndarray | None = None
    # Whether the batch's labels are each other's negatives, beside `classes`.
    labels_are_negatives: bool = True
    # The samples that have negatives, by their number in the batch, sorted; None for all.
    samples: np.ndarray | None = None
    # To be added to the logits of `classes`: minus the log of their probability to be drawn.
    correction: float = 0.0
    # What the inter-class loss is multiplied by; None for 1.
    inter_weight: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no sample has a negative."""
        is_drawn = self.classes is None or len(self.classes) > 0
        return not is_drawn and not self.labels_are_negatives

    def of_part(self, start: int, stop: int) -> Draw:
        """Return the draw of the samples from `start` to `stop` alone, with the same classes."""
        if self.samples is None:
            return self
        samples = self.samples[(self.samples >= start) & (self.samples < stop)] - start
        if len(samples):
            return self._replace(samples=samples)
        return self._replace(
            classes=np.empty(0, np.int64), labels_are_negatives=False, samples=None
        )


def generator(seed: int, step: int, stream: int = 0) -> np.random.Generator:
    """Return the random numbers of one step; those of another stream are independent."""
    return np.random.Generator(np.random.Philox(key=[seed, step]).jumped(stream))


def draw_others(
    random: np.random.Generator, num_classes: int, count: int, labels: np.ndarray
) -> np.ndarray:
    """Draw classes uniformly, without replacement, none of them a label.

    Parameters
    ----------
    num_classes : int
        K.
    count : int
        How many to draw; fewer if the labels leave no more.
    labels : (b,) int64
        Sorted, unique.

    Returns
    -------
    (count,) int64
        Sorted.
    """
    left = num_classes - len(labels)
    drawn = np.sort(random.choice(left, min(count, left), replace=False, shuffle=False))
    # Of the classes that are no labels, the i-th is class i plus the number of labels before it.
    return drawn + np.searchsorted(labels - np.arange(len(labels)), drawn, side="right")


class Sampler:
    """Base of the samplers: chooses the negatives of each step.

    Attributes
    ----------
    is_sparse : bool
        Whether a step uses the weights of some classes alone.
    needs_embeddings : bool
        Whether `draw` looks at the embeddings.
    """

    is_sparse = False
    needs_embeddings = False

    @classmethod
    def make(cls, setting: SamplerSetting) -> Sampler:
        """Make the sampler of a head; keyword-only parameters are the options of the loss."""
        return cls()

    def draw(self, step: int, labels: np.ndarray, embeddings=None) -> Draw:
        """Draw the negatives of a step.

        Parameters
        ----------
        step : int
        labels : (B,) int64
        embeddings : (B, D) NDArray
            None for an update that is announced before its embeddings exist, which only happens
            if the sampler does not need them.
        """
        raise NotImplementedError(f"{type(self).__name__} must define draw")

    def warn_about(self, batch_size: int) -> str:
        """Say what is wrong with batches of this size; nothing for most samplers."""
        return ""

    @property
    def stats(self) -> dict[str, float]:
        """What the last draw cost, if that is worth reporting."""
        return {}

    @property
    def state(self) -> dict[str, np.ndarray]:
        """What a resumed run needs, beside (seed, step), to draw the same."""
        return {}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from a saved `state`."""


class AllClasses(Sampler):
    """Every class but the sample's own is a negative."""

    def draw(self, step: int, labels: np.ndarray, embeddings=None) -> Draw:
        """Draw the negatives of a step; `labels` are (B,) int64."""
        return Draw()

    def __repr__(self) -> str:
        return "all classes"


class RandomClasses(Sampler):
    """A random subset of the classes, drawn fresh each step.

    ``round(rate * num_classes)`` of them, at least one. The classes of the batch itself are never
    dropped; `batch_classes` says whether they are negatives, too, for the samples of other classes.

    Parameters
    ----------
    num_classes : int
    sample_rate : float
        In (0, 1].
    batch_classes : {"excluded", "counted", "added"}
        What the classes of the batch are to the negatives. "excluded": none of them is one, as in
        D-Softmax-K. "counted": all of them are, within ``round(rate * num_classes)``, as in Partial
        FC; if they alone exceed that number, no class is drawn at random. "added": all of them are,
        beside ``round(rate * num_classes)`` random ones, as in the paper's Rand-Softmax.
    correction : {None, "logq"}
        "logq" subtracts the log of a class's probability to be drawn from its logit, so that the
        expected sum is that over all classes.
    seed : int
    """

    is_sparse = True

    def __init__(
        self,
        num_classes: int,
        sample_rate: float,
        batch_classes: str,
        correction: str | None = None,
        seed: int = 0,
    ):
        self.num_classes = num_classes
        self.sample_rate = check_rate(sample_rate)
        self.count = max(1, round(sample_rate * num_classes))
        if batch_classes not in BATCH_CLASSES:
            raise ValueError(
                f"batch_classes must be one of {', '.join(BATCH_CLASSES)}, not {batch_classes!r}"
            )
        self.batch_classes = batch_classes
        if correction not in (None, "logq"):
            raise ValueError(f"correction must be None or 'logq', not {correction!r}")
        self.correction = correction
        self.seed = seed

    @classmethod
    def make(
        cls,
        setting: SamplerSetting,
        *,
        sample_rate: float = PAPER_RATE,
        batch_classes: str | None = None,
        correction: str | None = None,
    ) -> RandomClasses:
        """Make the sampler of a head."""
        num_classes = setting.store.shape[0]
        batch_classes = batch_classes or setting.usual_batch_classes
        return cls(num_classes, sample_rate, batch_classes, correction, setting.seed)

    @property
    def labels_are_negatives(self) -> bool:
        """Whether the classes of the batch are negatives for the samples of other classes."""
        return self.batch_classes != EXCLUDED

    def count_random(self, labels: int) -> int:
        """Return how many classes are drawn beside so many distinct labels."""
        count = max(0, self.count - labels) if self.batch_classes == COUNTED else self.count
        return min(count, self.num_classes - labels)

    def warn_about(self, batch_size: int) -> str:
        """Say so if a batch may leave fewer random classes than it has classes itself."""
        labels = min(batch_size, self.num_classes)
        count = self.count_random(labels)
        if self.batch_classes != COUNTED or count >= labels:
            return ""
        return (
            f"of the {self.count} classes of a step, up to {labels} are those of the batch and "
            f"only {count} are random: choose a larger sample_rate, smaller batches or "
            "batch_classes=added"
        )

    def draw(self, step: int, labels: np.ndarray, embeddings=None) -> Draw:
        """Draw the classes of a step; `labels` are (B,) int64."""
        unique = np.unique(labels)
        count = self.count_random(len(unique))
        classes = draw_others(generator(self.seed, step), self.num_classes, count, unique)
        correction = 0.0
        if self.correction == "logq" and len(classes):
            # The drawn classes stand for all classes that could have been drawn and, where labels
            # are no negatives, for the labels too.
            left = self.num_classes - (len(unique) if self.labels_are_negatives else 0)
            correction = math.log(left / len(classes))
        return Draw(classes, self.labels_are_negatives, correction=correction)

    def __repr__(self) -> str:
        kind = f"the batch's classes {self.batch_classes}"
        correction = ", logq-corrected" if self.correction else ""
        return f"{self.count} of {self.num_classes} classes at random, {kind}{correction}"


class RandomRows(Sampler):
    """All classes, for a random subset of the batch's rows (its samples), as in D-Softmax-B.

    ``round(rate * B)`` samples, at least one. A sample that is not drawn has no negatives.

    Parameters
    ----------
    sample_rate : float
        In (0, 1].
    seed : int
    mean_over_rows : bool
        Divide the inter-class loss by the number of drawn samples instead of the batch size.
    """

    def __init__(self, sample_rate: float, seed: int = 0, mean_over_rows: bool = False):
        self.sample_rate = check_rate(sample_rate)
        self.seed = seed
        self.mean_over_rows = mean_over_rows

    @classmethod
    def make(
        cls,
        setting: SamplerSetting,
        *,
        sample_rate: float = PAPER_RATE,
        mean_over_rows: bool = False,
    ) -> RandomRows:
        """Make the sampler of a head."""
        return cls(sample_rate, setting.seed, mean_over_rows)

    def draw(self, step: int, labels: np.ndarray, embeddings=None) -> Draw:
        """Draw the samples of a step; `labels` are (B,) int64."""
        count = max(1, round(self.sample_rate * len(labels)))
        samples = generator(self.seed, step).choice(len(labels), count, replace=False)
        inter_weight = 1 / (count / len(labels)) if self.mean_over_rows else None
        return Draw(samples=np.sort(samples), inter_weight=inter_weight)

    def __repr__(self) -> str:
        return f"all classes, for {self.sample_rate:g} of the samples at random"


def check_rate(rate: float) -> float:
    """Return a sampling rate, or raise."""
    if not 0 < rate <= 1:
        raise ValueError(f"sample_rate must lie in (0, 1], not {rate!r}")
    return rate
