"""A network small enough to be trained on a CPU."""

from __future__ import annotations

from typing import Any

from mxnet.gluon.block import HybridBlock

from dsoftmax.recognition.networks.features import Features
from dsoftmax.recognition.networks.layers import (
    Norm,
    ScalePixels,
    activation,
    convolution,
    sequence,
)

NETWORKS: dict[str, dict[str, Any]] = {
    "tiny": {"embedding_size": 128, "output": "J", "act": "relu", "multiplier": 1.0}
}
STAGES = ((16, 0), (32, 0), (64, 1), (128, 1))  # channels and residual units of each


class Tiny(Features):
    """Four stages: a 3x3 convolution that halves the image, and residual units of one more.

    The feature map is not pooled, because it matters where an eye is. There are no convolutions of
    single channels, which MXNet computes slowly on CPUs.

    Parameters
    ----------
    norm, act
        See `Features`.
    multiplier : float
        Factor of all numbers of channels.
    """

    def __init__(self, norm: Norm, act: str, multiplier: float):
        super().__init__(ScalePixels())
        for stage, (channels, units) in enumerate(STAGES, 1):
            width = round(multiplier * channels)
            self.body.add(_convolve(f"stage{stage}", width, 2, norm, act))
            for unit in range(1, units + 1):
                name = f"stage{stage}_unit{unit}"
                self.body.add(_Residual(name, _convolve(name, width, 1, norm, act)))


class _Residual(HybridBlock):
    def __init__(self, name: str, branch: HybridBlock):
        super().__init__(prefix=f"{name}_")
        self.branch = branch

    def hybrid_forward(self, F, data):
        """Add the output of the branch to `data`."""
        return data + self.branch(data)


def _convolve(name: str, channels: int, stride: int, norm: Norm, act: str) -> HybridBlock:
    return sequence(
        convolution(f"{name}_conv", channels, 3, stride),
        norm(f"{name}_bn"),
        activation(act, f"{name}_relu"),
    )
