"""Figures of a batch, which tell how training goes."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from mxnet import nd

from dsoftmax.losses.kernels import NOTHING, from_numpy
from dsoftmax.losses.negatives import NegativeSums
from dsoftmax.losses.step import StepInputs


class Figures(NamedTuple):
    """What the figures of a batch are made of."""

    num_classes: int
    inputs: StepInputs
    z_y: nd.NDArray  # (B,)
    negatives: NegativeSums  # of the samples that have negatives
    loss_parts: dict[str, list[nd.NDArray]]  # (some,) each, of all samples together

    def orthogonal_n(self) -> float:
        """Return what n would be if every negative were orthogonal to its sample."""
        drawn, labels = self.inputs.count_negatives(self.num_classes)
        total = drawn * math.exp(self.inputs.draw.correction) + labels
        return math.log(total) if total else NOTHING

    def inter_share(self) -> float:
        """Return by what the mean inter loss is multiplied because some samples have none."""
        draw, labels = self.inputs.draw, self.inputs.labels
        share = 1.0 if draw.samples is None else len(draw.samples) / len(labels)
        return share if draw.inter_weight is None else share * draw.inter_weight

    def stats(self) -> dict[str, float]:
        """Return the figures that `Head.stats` shows of every loss, by one read."""
        labels, draw, scale = self.inputs[:3]
        z_y, negatives = self.z_y, self.negatives
        if draw.samples is not None:
            z_y = nd.take(z_y, from_numpy(draw.samples, z_y.context))
        count = sum(self.inputs.count_negatives(self.num_classes)) * len(z_y)
        touched = self.num_classes
        if draw.classes is not None:
            touched = len(draw.classes) + len(np.unique(labels))
        accuracy, positive, negative_sum, negative_max, *means = _read(
            [
                (scale * z_y > negatives.logit_max).mean(),
                self.z_y.mean(),
                negatives.logit_sum.sum(),
                negatives.logit_max.max(),
                *(part.mean() for parts in self.loss_parts.values() for part in parts),
            ]
        )
        stats = {}
        for name, parts in self.loss_parts.items():
            total = sum(means.pop(0) * part.size for part in parts)
            stats[name] = total / sum(part.size for part in parts)
        return {
            **stats,
            "accuracy": accuracy,
            "positive_cosine": positive,
            "negative_cosine": negative_sum / scale / max(count, 1),
            "max_negative_cosine": negative_max / scale,
            "negatives": sum(self.inputs.count_negatives(self.num_classes)),
            "rows_touched": touched * self.inputs.subcentres,
        }


def _read(numbers: list[nd.NDArray]) -> list[float]:
    """Return the numbers of several arrays (1,): each read would wait for the device."""
    context = numbers[0].context
    joined = nd.concat(*(number.as_in_context(context) for number in numbers), dim=0)
    return joined.asnumpy().tolist()
