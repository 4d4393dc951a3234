"""The criteria: each loss of the family as a few lines on two numbers per sample.

`z_y` is the cosine with the sample's own class, `n` the log-sum-exp of the scaled cosines with its
negatives, or another sum over them that the criterion chooses (`Criterion.reduction`). A criterion
does not know which negatives these are, where their weights live, or how n was computed. Each
family of criteria has a file.
"""

from dsoftmax.losses.criteria.adaface import AdaFace
from dsoftmax.losses.criteria.angles import (
    add_angle,
    add_angles,
    angle_of,
    multiply_angle,
    sine_of,
)
from dsoftmax.losses.criteria.arcface import ArcFace
from dsoftmax.losses.criteria.base import (
    BatchContext,
    Criterion,
    Dissected,
    Entangled,
    in_range,
    softplus,
)
from dsoftmax.losses.criteria.circle import Circle
from dsoftmax.losses.criteria.combined import Combined
from dsoftmax.losses.criteria.cosface import CosFace
from dsoftmax.losses.criteria.curricularface import CurricularFace
from dsoftmax.losses.criteria.dsoftmax import DSoftmax, DSoftmaxArcFace, DSoftmaxSoftmax, Hybrid
from dsoftmax.losses.criteria.magface import MagFace
from dsoftmax.losses.criteria.mv_softmax import MVSoftmax
from dsoftmax.losses.criteria.softmax import Softmax
from dsoftmax.losses.criteria.sphereface import SphereFace, SphereFaceR
from dsoftmax.losses.criteria.sphereface2 import SphereFace2
from dsoftmax.losses.criteria.uniface import UniFace

__all__ = [
    "AdaFace",
    "ArcFace",
    "BatchContext",
    "Circle",
    "Combined",
    "CosFace",
    "Criterion",
    "CurricularFace",
    "DSoftmax",
    "DSoftmaxArcFace",
    "DSoftmaxSoftmax",
    "Dissected",
    "Entangled",
    "Hybrid",
    "MVSoftmax",
    "MagFace",
    "Softmax",
    "SphereFace",
    "SphereFace2",
    "SphereFaceR",
    "UniFace",
    "add_angle",
    "add_angles",
    "angle_of",
    "in_range",
    "multiply_angle",
    "sine_of",
    "softplus",
]
