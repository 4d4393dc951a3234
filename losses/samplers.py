"""Which negatives enter n: all classes, random classes, random rows.

What is drawn is a function of (seed, step) and the batch's labels, once for all devices: each takes
the classes that fall into its share. So results do not depend on how many devices there are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Draw(NamedTuple):
    """The negatives of one step."""

    # Classes whose weights are negatives, sorted, none of them a label of the batch; None for all.
    classes: np.ndarray | None = None
    # Whether the batch's labels are each other's negatives, beside `classes`.
    labels_are_negatives: bool = True
    # The samples that have negatives, by their number in the batch, sorted; None for all.
    samples: np.ndarray | None = None
    # To be added to the logits of `classes`: the log of one over the chance to be drawn.
    correction: float = 0.0


def generator(seed: int, step: int, stream: int = 0) -> np.random.Generator:
    """Return the random numbers of one step; those of another stream are independent."""
    return np.random.Generator(np.random.Philox(key=[seed, step]).jumped(stream))


def draw_others(
    random: np.random.Generator, num_classes: int, count: int, labels: np.ndarray
) -> np.ndarray:
    """Draw classes uniformly, without replacement, none of them a label.

    Parameters
    ----------
    num_classes, count : int
        Draw so many of so many; fewer where the labels leave no more.
    labels : (b,) int64
        Sorted, unique.

    Returns
    -------
    (count,) int64
        Sorted.
    """
    left = num_classes - len(labels)
    drawn = np.sort(random.choice(left, min(count, left), replace=False, shuffle=False))
    # Among the classes that are no labels, the i-th is i plus the number of labels before it.
    return drawn + np.searchsorted(labels - np.arange(len(labels)), drawn, side="right")


class AllClasses:
    """Every class but the own one is a negative."""

    is_sparse = False

    def draw(self, step: int, labels: np.ndarray, embeddings=None) -> Draw:
        """Draw the negatives of a step; `labels` are (B,) int64."""
        return Draw()

    @property
    def stats(self) -> dict[str, float]:
        """What the last draw cost, where that is worth telling."""
        return {}

    @property
    def state(self) -> dict[str, np.ndarray]:
        """What a resumed run needs beside (seed, step) to draw the same."""
        return {}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Go on with a `state` that was saved."""

    def __repr__(self) -> str:
        return "all classes"


class RandomClasses(AllClasses):
    """A random subset of the classes, drawn fresh each step.

    Exactly ``round(rate * num_classes)``, at least one. For a dissected criterion none of them is a
    label of the batch, as of D-Softmax-K. For the others the batch's labels are always among them:
    each is a negative to the samples of other classes (Rand-Softmax, Partial FC); labels are kept
    even where they alone are more than the rate allows.

    Parameters
    ----------
    num_classes : int
    sample_rate : float
        In (0, 1].
    exclude_labels : bool
        Whether the batch's labels are no negatives.
    correction : {None, "logq"}
        Add the log of one over a class's chance to its logit, so that the expected sum is that of
        all classes.
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

    def draw(self, step: int, labels: np.ndarray, embeddings=None) -> Draw:
        """Draw the classes of a step; `labels` are (B,) int64."""
        unique = np.unique(labels)
        count = self.count if self.exclude_labels else max(0, self.count - len(unique))
        classes = draw_others(generator(self.seed, step), self.num_classes, count, unique)
        correction = 0.0
        if self.correction == "logq" and len(classes):
            # Those drawn stand for all that could have been: with the labels left out of the
            # negatives, for the labels too.
            left = self.num_classes - (0 if self.exclude_labels else len(unique))
            correction = math.log(left / len(classes))
        return Draw(classes, not self.exclude_labels, correction=correction)

    def __repr__(self) -> str:
        kind = "none of the batch's labels" if self.exclude_labels else "with the batch's labels"
        correction = ", logq-corrected" if self.correction else ""
        return f"{self.count} of {self.num_classes} classes at random, {kind}{correction}"


class RandomRows(AllClasses):
    """All classes, for a random subset of the batch's rows, as of D-Softmax-B.

    ``round(rate * B)`` rows, at least one. A row that is not drawn has no negatives.

    Parameters
    ----------
    sample_rate : float
        In (0, 1].
    seed : int
    """

    def __init__(self, sample_rate: float, seed: int = 0):
        self.sample_rate = check_rate(sample_rate)
        self.seed = seed

    def draw(self, step: int, labels: np.ndarray, embeddings=None) -> Draw:
        """Draw the rows of a step; `labels` are (B,) int64."""
        count = max(1, round(self.sample_rate * len(labels)))
        rows = generator(self.seed, step).choice(len(labels), count, replace=False)
        return Draw(samples=np.sort(rows))

    def __repr__(self) -> str:
        return f"all classes, for {self.sample_rate:g} of the rows at random"


def check_rate(rate: float) -> float:
    """Return a sampling rate, or raise."""
    if not 0 < rate <= 1:
        raise ValueError(f"sample_rate must lie in (0, 1], not {rate!r}")
    return rate
