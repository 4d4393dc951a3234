"""The loss family of Dissected Softmax, as Gluon blocks.

    head = losses.create("dsoftmax_k", num_classes=757000, embedding_size=512, sample_rate=1 / 64)

A loss is a criterion on two numbers a sample: the cosine with its own class, z_y, and the
log-sum-exp of the scaled cosines with its negatives, n. Which negatives, where the class weights
live, and how much memory n may take are independent choices.
"""

from dsoftmax.recognition.common.preflight import check_mxnet

check_mxnet()

from dsoftmax.losses import operators  # noqa: E402

operators.load()

from dsoftmax.losses.criteria import (  # noqa: E402
    AdaFace,
    ArcFace,
    Combined,
    CosFace,
    Criterion,
    DSoftmax,
    DSoftmaxArcFace,
    DSoftmaxSoftmax,
    Softmax,
    SphereFace,
)
from dsoftmax.losses.head import Head  # noqa: E402
from dsoftmax.losses.log_sum_exp import NegativeLogSumExp  # noqa: E402
from dsoftmax.losses.presets import create, names  # noqa: E402
from dsoftmax.losses.trainer import HeadTrainer  # noqa: E402

__all__ = [
    "AdaFace",
    "ArcFace",
    "Combined",
    "CosFace",
    "Criterion",
    "DSoftmax",
    "DSoftmaxArcFace",
    "DSoftmaxSoftmax",
    "Head",
    "HeadTrainer",
    "NegativeLogSumExp",
    "Softmax",
    "SphereFace",
    "create",
    "names",
]
