"""Figures of a batch, which tell how training goes."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from mxnet import nd

from dsoftmax.losses.kernels import NOTHING, from_numpy
from dsoftmax.losses.log_sum_exp import NegativeSums
from dsoftmax.losses.step import StepInputs


class Figures(NamedTuple):
    """What the figures of a batch are made of."""

    num_classes: int
    inputs: StepInputs
    z_y: nd.NDArray  # (B,)
    negatives: NegativeSums  # of the samples that have negatives

    def orthogonal_n(self) -> float:
        """Return what n would be if every negative were orthogonal to its sample."""
        drawn, labels = self._count_negatives()
        total = drawn * math.exp(self.inputs.draw.correction) + labels
        return math.log(total) if total else NOTHING

    def inter_share(self) -> float:
        """Return by what the mean inter loss is multiplied because some samples have none."""
        draw, labels = self.inputs.draw, self.inputs.labels
        share = 1.0 if draw.samples is None else len(draw.samples) / len(labels)
        return share if draw.inter_weight is None else share * draw.inter_weight

    def _count_negatives(self) -> tuple[int, int]:
        """Count a sample's negatives: those that were drawn, and those that are labels."""
        classes = self.inputs.draw.classes
        if classes is None:
            return 0, self.num_classes - 1
        if not self.inputs.draw.labels_are_negatives:
            return len(classes), 0
        return len(classes), len(np.unique(self.inputs.labels)) - 1

    def stats(self) -> dict[str, float]:
        """Return the figures that `Head.stats` shows of every loss."""
        labels, draw, scale = self.inputs[:3]
        z_y, negatives = self.z_y, self.negatives
        if draw.samples is not None:
            z_y = nd.take(z_y, from_numpy(draw.samples, z_y.context))
        count = sum(self._count_negatives()) * len(z_y)
        touched = self.num_classes
        if draw.classes is not None:
            touched = len(draw.classes) + len(np.unique(labels))
        return {
            "accuracy": float((scale * z_y > negatives.logit_max).mean().asscalar()),
            "positive_cosine": float(self.z_y.mean().asscalar()),
            "negative_cosine": float(negatives.logit_sum.sum().asscalar()) / scale / max(count, 1),
            "max_negative_cosine": float(negatives.logit_max.max().asscalar()) / scale,
            "negatives": sum(self._count_negatives()),
            "rows_touched": touched,
        }
