"""Which negatives enter n: all classes, random ones, the batch's own, or all for random samples.

A draw is a function of (seed, step) and the batch's labels, the same for all devices: each device
takes the classes of its shard. So results do not depend on how many devices there are.
"""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING, List, NamedTuple, Tuple, Union

import numpy as np

if TYPE_CHECKING:
    from dsoftmax.losses.stores.base import ClassStore

    Rate = Union[float, List[Tuple[int, float]]]

PAPER_RATE = 1 / 64  # the paper's, and the default
EXCLUDED, COUNTED, ADDED = BATCH_CLASSES = ("excluded", "counted", "added")


class SampleRate:
    """A share of the classes or samples, which may change during training.

    Parameters
    ----------
    rate : float or list of (int, float)
        In (0, 1]; or the steps from which on rates hold, in order, the first of them 0.

    Examples
    --------
    >>> rate = SampleRate([(0, 0.1), (20000, 1.0)])
    >>> rate.at(19999), rate.at(20000)
    (0.1, 1.0)
    """

    def __init__(self, rate: Rate):
        self.is_scheduled = isinstance(rate, (list, tuple))
        pairs = rate if self.is_scheduled else [(0, rate)]
        if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"sample_rate must be a number or pairs (step, rate), not {rate!r}")
        self.steps, self.rates = [int(step) for step, _ in pairs], [rate for _, rate in pairs]
        for value in self.rates:
            if not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise ValueError(f"sample_rate must lie in (0, 1], not {value!r}")
        if not pairs or self.steps[0] != 0 or self.steps != sorted(set(self.steps)):
            raise ValueError(
                f"the steps of sample_rate must begin with 0 and rise, not be {self.steps}"
            )

    def at(self, step: int) -> float:
        """Return the rate of a step."""
        return self.rates[bisect.bisect_right(self.steps, step) - 1]

    def count(self, step: int, of: int) -> int:
        """Return how many of so many classes or samples a step takes, at least one."""
        return max(1, round(self.at(step) * of))

    def describe(self, of: int) -> str:
        """Say how many of so many classes a step takes, and from which step on."""
        first, *others = (
            f"{self.count(step, of)} of {of} classes" + f" from step {step} on" * (step > 0)
            for step in self.steps
        )
        return ", ".join([first, *others])


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


class BatchClasses(Sampler):
    """The other classes of the batch are the negatives, and no class beside them."""

    is_sparse = True

    def draw(self, step: int, labels: np.ndarray, embeddings=None) -> Draw:
        """Draw the negatives of a step; `labels` are (B,) int64."""
        return Draw(np.empty(0, np.int64))

    def __repr__(self) -> str:
        return "the other classes of the batch"


class RandomClasses(Sampler):
    """A random subset of the classes, drawn fresh each step.

    ``round(rate * num_classes)`` of them, at least one. The classes of the batch itself are never
    dropped; `batch_classes` says whether they are negatives, too, for the samples of other classes.

    Parameters
    ----------
    num_classes : int
    sample_rate : float or list of (int, float)
        As for `SampleRate`.
    batch_classes : {"excluded", "counted", "added"}
        What the classes of the batch are to the negatives. "excluded": none of them is one, as in
        D-Softmax-K. "counted": all of them are, within ``round(rate * num_classes)``, as in Partial
        FC; if they alone exceed that number, no class is drawn at random. "added": all of them are,
        beside ``round(rate * num_classes)`` random ones, as in the paper's Rand-Softmax.
    correction : {None, "logq"}
        "logq" subtracts the log of a class's probability to be drawn from its logit, so that the
        expected sum is that over all classes.
    seed : int
    may_take_all : bool
        Whether a schedule that has come to all classes may use them where they are stored, instead
        of a copy of all of them.
    """

    is_sparse = True

    def __init__(
        self,
        num_classes: int,
        sample_rate: Rate,
        batch_classes: str,
        correction: str | None = None,
        seed: int = 0,
        may_take_all: bool = False,
    ):
        self.num_classes = num_classes
        self.rate = SampleRate(sample_rate)
        if batch_classes not in BATCH_CLASSES:
            raise ValueError(
                f"batch_classes must be one of {', '.join(BATCH_CLASSES)}, not {batch_classes!r}"
            )
        self.batch_classes = batch_classes
        if correction not in (None, "logq"):
            raise ValueError(f"correction must be None or 'logq', not {correction!r}")
        self.correction = correction
        self.seed = seed
        self._may_take_all = may_take_all and self.rate.is_scheduled

    @classmethod
    def make(
        cls,
        setting: SamplerSetting,
        *,
        sample_rate: Rate = PAPER_RATE,
        batch_classes: str | None = None,
        correction: str | None = None,
    ) -> RandomClasses:
        """Make the sampler of a head."""
        return cls(
            setting.store.num_classes,
            sample_rate,
            batch_classes or setting.usual_batch_classes,
            correction,
            setting.seed,
            may_take_all=not setting.store.needs_sampled_classes,
        )

    @property
    def labels_are_negatives(self) -> bool:
        """Whether the classes of the batch are negatives for the samples of other classes."""
        return self.batch_classes != EXCLUDED

    def count_random(self, step: int, labels: int) -> int:
        """Return how many classes a step draws beside so many distinct labels."""
        count = self.rate.count(step, self.num_classes)
        if self.batch_classes == COUNTED:
            count = max(0, count - labels)
        return min(count, self.num_classes - labels)

    def warn_about(self, batch_size: int) -> str:
        """Say so if a batch may leave fewer random classes than it has classes itself."""
        labels = min(batch_size, self.num_classes)
        step = min(self.rate.steps, key=self.rate.at)
        count = self.count_random(step, labels)
        if self.batch_classes != COUNTED or count >= labels:
            return ""
        total = self.rate.count(step, self.num_classes)
        return (
            f"of the {total} classes of a step, up to {labels} are those of the batch and "
            f"only {count} are random: choose a larger sample_rate, smaller batches or "
            "batch_classes=added"
        )

    def draw(self, step: int, labels: np.ndarray, embeddings=None) -> Draw:
        """Draw the classes of a step; `labels` are (B,) int64."""
        unique = np.unique(labels)
        count = self.count_random(step, len(unique))
        is_all = self.labels_are_negatives and count + len(unique) == self.num_classes
        if is_all and self._may_take_all:
            return Draw()
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
        return f"{self.rate.describe(self.num_classes)} at random, {kind}{correction}"


class RandomRows(Sampler):
    """All classes, for a random subset of the batch's rows (its samples), as in D-Softmax-B.

    ``round(rate * B)`` samples, at least one. A sample that is not drawn has no negatives.

    Parameters
    ----------
    sample_rate : float or list of (int, float)
        As for `SampleRate`.
    seed : int
    mean_over_rows : bool
        Divide the inter-class loss by the number of drawn samples instead of the batch size.
    """

    def __init__(self, sample_rate: Rate, seed: int = 0, mean_over_rows: bool = False):
        self.rate = SampleRate(sample_rate)
        self.seed = seed
        self.mean_over_rows = mean_over_rows

    @classmethod
    def make(
        cls,
        setting: SamplerSetting,
        *,
        sample_rate: Rate = PAPER_RATE,
        mean_over_rows: bool = False,
    ) -> RandomRows:
        """Make the sampler of a head."""
        return cls(sample_rate, setting.seed, mean_over_rows)

    def draw(self, step: int, labels: np.ndarray, embeddings=None) -> Draw:
        """Draw the samples of a step; `labels` are (B,) int64."""
        count = self.rate.count(step, len(labels))
        samples = generator(self.seed, step).choice(len(labels), count, replace=False)
        inter_weight = 1 / (count / len(labels)) if self.mean_over_rows else None
        return Draw(samples=np.sort(samples), inter_weight=inter_weight)

    def __repr__(self) -> str:
        rates = [
            f"{rate:g}" + f" from step {step} on" * (step > 0)
            for step, rate in zip(self.rate.steps, self.rate.rates)
        ]
        return f"all classes, for {', '.join(rates)} of the samples at random"
