"""Verify that two faces show one person, by the protocol of LFW.

The embedding of an image is the sum of its embedding and its mirror image's. The accuracy comes
from a cross-validation over ten folds in the order of the file, with insightface's thresholds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Sequence

import numpy as np

from dsoftmax.eval import metrics, plots
from dsoftmax.eval.embed import embed_batches
from dsoftmax.eval.models import Embed
from dsoftmax.recognition.data.images import fit
from dsoftmax.recognition.data.packs import Pack

VAL_FAR = 1e-3
USUAL_FARS = (1e-1, 1e-2, 1e-3)  # of thresholds that nobody asked for


@dataclass(frozen=True)
class Verification:
    """The result of one pack.

    Attributes
    ----------
    name : str
        The pack's name.
    issame : (P,) bool
        Whether a pair shows one person.
    embeddings : (2P, D) float32
        Embeddings of image and mirror image, summed and scaled to length 1.
    cosines : (P,) float32
    xnorm : float
        The mean length of the embeddings that the network returned.
    accuracy : metrics.FoldAccuracy
        With mirror images, insightface's "Accuracy-Flip".
    plain_accuracy : metrics.FoldAccuracy
        Without mirror images.
    val : metrics.FoldRate
        The true accept rate at the false accept rate 0.001.
    auc, eer : float
        NaN where all pairs are of one kind.
    people : (P, 2) str, optional
        Whom the images show, if the pack says so.
    """

    name: str
    issame: np.ndarray
    embeddings: np.ndarray
    cosines: np.ndarray
    xnorm: float
    accuracy: metrics.FoldAccuracy
    plain_accuracy: metrics.FoldAccuracy
    val: metrics.FoldRate
    auc: float
    eer: float
    people: np.ndarray | None = None

    @property
    def genuine(self) -> np.ndarray:
        """Cosines of the pairs of one person."""
        return self.cosines[self.issame]

    @property
    def impostor(self) -> np.ndarray:
        """Cosines of the pairs of two people."""
        return self.cosines[~self.issame]

    @property
    def threshold(self) -> float:
        """The cosine above which a pair counts as one person; the mean over the folds."""
        return float(1 - self.accuracy.thresholds.mean() / 2)

    @property
    def is_right(self) -> np.ndarray:
        """Whether `threshold` decides a pair rightly, (P,) bool."""
        return (self.cosines > self.threshold) == self.issame

    def calibrate(self, fars: Sequence[float]) -> list[metrics.Calibration]:
        """Return thresholds for false accept rates, with intervals by people if they are known."""
        found = metrics.calibrate(self.genuine, self.impostor, fars)
        if self.people is None:
            return found
        return metrics.widen_by_people(found, self.cosines, self.issame, self.people)

    def accuracy_interval(self) -> metrics.Interval:
        """Return the 95 % interval of the accuracy at `threshold`, by people if they are known."""
        if self.people is None:
            return metrics.share_interval(np.count_nonzero(self.is_right), len(self.issame))
        return metrics.share_interval_by_people(self.is_right, self.people)

    def thresholds_json(self, calibrations: Sequence[metrics.Calibration]) -> dict[str, Any]:
        """Return thresholds and the accuracy's interval, to be added to `as_json`."""
        return {
            "calibration": [
                {
                    "far": one.far,
                    "cosine": one.point.threshold,
                    "cosine_interval": list(one.threshold),
                    "observed_far": one.point.far,
                    "tar": one.point.tar,
                    "tar_interval": list(one.tar),
                    "pairs_needed": one.pairs_needed,
                }
                for one in calibrations
            ],
            "accuracy_interval": list(self.accuracy_interval()),
        }

    def lines(self, step: int | None = None) -> list[str]:
        """Return insightface's lines and some more; with a step as in its training log."""
        head = f"[{self.name}]" if step is None else f"[{self.name}][{step}]"
        plain, flip = self.plain_accuracy, self.accuracy
        return [
            f"{head}XNorm: {self.xnorm:f}",
            f"{head}Accuracy: {plain.mean:1.5f}+-{plain.deviation:1.5f}",
            f"{head}Accuracy-Flip: {flip.mean:1.5f}+-{flip.deviation:1.5f}",
            f"{head}VAL@FAR={VAL_FAR:g}: {self.val.mean:1.5f}+-{self.val.deviation:1.5f} "
            f"(FAR {self.val.far:.5f})",
            f"{head}AUC: {self.auc:1.5f} EER: {self.eer:1.5f}",
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the figures, the curve and the histogram of scores."""
        entry = {
            "target": self.name,
            "pairs": len(self.issame),
            "same": int(self.issame.sum()),
            "width": self.embeddings.shape[1],
            "xnorm": self.xnorm,
            "accuracy_flip": self.accuracy.mean,
            "accuracy_flip_std": self.accuracy.deviation,
            "accuracy": self.plain_accuracy.mean,
            "accuracy_std": self.plain_accuracy.deviation,
            "cosine_threshold": self.threshold,
            "val": {"far": VAL_FAR, "tar": self.val.mean, "std": self.val.deviation},
            "auc": self.auc,
            "eer": self.eer,
            "scores": plots.bin_scores(self.genuine, self.impostor, self.threshold)._asdict(),
        }
        if self.impostor.size:
            entry["highest_impostor"] = float(self.impostor.max())
        if self.genuine.size and self.impostor.size:
            entry["roc"] = plots.sample_roc(self.genuine, self.impostor)._asdict()
        return entry


def verify(
    embed: Embed,
    pack: Pack,
    batch_size: int = 32,
    folds: int = 10,
    size: tuple[int, int] | None = None,
    threads: int = 2,
) -> Verification:
    """Verify the pairs of one pack.

    Parameters
    ----------
    embed : callable
        Maps (n, 3, height, width) uint8 images, RGB, to (n, D) embeddings as numpy arrays: a model
        of `load_model`, or any function.
    pack : Pack
        At least two pairs.
    batch_size : int
    folds : int
        Of the cross-validation.
    size : (int, int), optional
        Height and width that images are resized to; by default those of the first image.
    threads : int
        Decoding threads.

    Returns
    -------
    Verification

    Examples
    --------
    >>> def mean_colour(images):
    ...     return images.mean(axis=(2, 3))
    >>> verify(mean_colour, read_pack("lfw.bin")).accuracy.mean  # doctest: +SKIP
    0.548
    """
    height, width = size or pack.decode(0).shape[:2]

    def load(image: int) -> np.ndarray:
        return fit(pack.decode(image), height, width)

    images = range(2 * len(pack))
    batches = embed_batches(embed, load, images, batch_size, threads, desc=pack.name)
    views = np.concatenate([batch.views for batch in batches])
    try:
        plain, summed = metrics.normalized(views[:, 0]), metrics.normalized(views.sum(axis=1))
    except ValueError as error:
        raise ValueError(f"{pack.name}: {error}") from None
    distances = metrics.squared_distances(summed)
    cosines = 1 - distances / 2
    has_both = 0 < pack.issame.sum() < len(pack)
    curve = metrics.roc(cosines[pack.issame], cosines[~pack.issame]) if has_both else None
    plain_distances = metrics.squared_distances(plain)
    return Verification(
        name=pack.name,
        issame=pack.issame,
        embeddings=summed,
        cosines=cosines,
        xnorm=float(np.linalg.norm(views, axis=2).mean(dtype=np.float64)),
        accuracy=metrics.fold_accuracy(distances, pack.issame, folds),
        plain_accuracy=metrics.fold_accuracy(plain_distances, pack.issame, folds),
        val=metrics.fold_tar(cosines, pack.issame, VAL_FAR, folds),
        auc=curve.auc if curve else math.nan,
        eer=curve.eer if curve else math.nan,
        people=pack.people,
    )


def evaluate(
    embed: Embed,
    packs: Sequence[Pack],
    batch_size: int = 32,
    folds: int = 10,
    size: tuple[int, int] | None = None,
    threads: int = 2,
) -> list[Verification]:
    """Verify the pairs of several packs, one after the other.

    Parameters
    ----------
    embed, batch_size, folds, size, threads
        See `verify`.
    packs : sequence of Pack

    Returns
    -------
    list of Verification
        One per pack.
    """
    return [verify(embed, pack, batch_size, folds, size, threads) for pack in packs]
