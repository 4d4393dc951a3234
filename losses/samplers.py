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


class SamplerSetting(NamedTuple):
    """What a head tells its sampler, beside the sampler's options."""

    store: ClassStore
    dissected: bool  # whether the criterion leaves the batch's labels out of the negatives
    normalize: bool  # cosines, or plain inner products
    seed: int


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

    Exactly ``round(rate * num_classes)``, at least one. With `exclude_labels` none of them is a
    label of the batch, as in D-Softmax-K. Without it the batch's labels are always among them: each
    is a negative for the samples of other classes (Rand-Softmax, Partial FC). Labels are never
    dropped, even if they alone exceed the rate.

    Parameters
    ----------
    num_classes : int
    sample_rate : float
        In (0, 1].
    exclude_labels : bool
        Whether the batch's labels are kept out of the negatives.
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
        exclude_labels: bool,
        correction: str | None = None,
        seed: int = 0,
    ):
        self.num_classes = num_classes
        self.sample_rate = check_rate(sample_rate)
        self.count = max(1, round(sample_rate * num_classes))
        self.exclude_labels = exclude_labels
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
        correction: str | None = None,
    ) -> RandomClasses:
        """Make the sampler of a head."""
        num_classes = setting.store.shape[0]
        return cls(num_classes, sample_rate, setting.dissected, correction, setting.seed)

    def draw(self, step: int, labels: np.ndarray, embeddings=None) -> Draw:
        """Draw the classes of a step; `labels` are (B,) int64."""
        unique = np.unique(labels)
        count = self.count if self.exclude_labels else max(0, self.count - len(unique))
        classes = draw_others(generator(self.seed, step), self.num_classes, count, unique)
        correction = 0.0
        if self.correction == "logq" and len(classes):
            # The drawn classes stand for all classes that could have been drawn and, where labels
            # are no negatives, for the labels too.
            left = self.num_classes - (0 if self.exclude_labels else len(unique))
            correction = math.log(left / len(classes))
        return Draw(classes, not self.exclude_labels, correction=correction)

    def __repr__(self) -> str:
        kind = "none of the batch's labels" if self.exclude_labels else "with the batch's labels"
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
