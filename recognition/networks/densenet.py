"""DenseNet for faces, as insightface's ``fdensenet`` names its parts: d121 to d201."""

from __future__ import annotations

from typing import Any, Sequence

from mxnet.gluon import nn
from mxnet.gluon.block import HybridBlock

from dsoftmax.recognition.networks.features import Features
from dsoftmax.recognition.networks.layers import (
    GLUON_NORM,
    Norm,
    ScalePixels,
    activation,
    convolution,
    sequence,
)

_DEFAULTS: dict[str, Any] = {"embedding_size": 512, "output": "E", "densenet_dropout": 0.0}
_NARROW, _WIDE = {"stem": 64, "growth": 32}, {"stem": 96, "growth": 48}
NETWORKS = {
    "d121": {**_DEFAULTS, **_NARROW, "units_per_stage": (6, 12, 24, 16)},
    "d161": {**_DEFAULTS, **_WIDE, "units_per_stage": (6, 12, 36, 24)},
    "d169": {**_DEFAULTS, **_NARROW, "units_per_stage": (6, 12, 32, 32)},
    "d201": {**_DEFAULTS, **_NARROW, "units_per_stage": (6, 12, 48, 32)},
}
PREFIX = "densenet0"
BOTTLENECK = 4  # inner channels of a unit, as a multiple of those it adds


class DenseNet(Features):
    """Computes features by units, each of which adds channels to its input.

    Parameters
    ----------
    norm, act
        See `Features`. The first and the last activation are ReLU, whatever `act` is.
    stem : int
        Channels of the first convolution.
    growth : int
        Channels that each unit adds to its input.
    units_per_stage : sequence of int
        Number of units in each stage; between two, channels and sides are halved.
    densenet_dropout : float
        Rate of dropout in each unit.
    """

    def __init__(
        self,
        norm: Norm,
        act: str,
        stem: int,
        growth: int,
        units_per_stage: Sequence[int],
        densenet_dropout: float,
    ):
        super().__init__(
            ScalePixels(),
            convolution(f"{PREFIX}_conv0", stem, 3),
            norm(f"{PREFIX}_batchnorm0", **GLUON_NORM),
            activation("relu", f"{PREFIX}_relu0"),
            nn.MaxPool2D(3, 2, 1, prefix=f"{PREFIX}_pool0_"),
        )
        channels = stem
        for stage, units in enumerate(units_per_stage, 1):
            for place in range(units):
                name = f"{PREFIX}_stage{stage}"
                self.body.add(_Unit(name, place, channels, growth, densenet_dropout, norm, act))
                channels += growth
            if stage < len(units_per_stage):
                self.body.add(
                    *_layers(PREFIX, stage, channels, channels // 2, 1, norm, act, stage - 1),
                    nn.AvgPool2D(2, 2, prefix=f"{PREFIX}_pool{stage}_"),
                )
                channels //= 2
        self.body.add(
            norm(f"{PREFIX}_batchnorm{len(units_per_stage)}", **GLUON_NORM),
            activation("relu", f"{PREFIX}_relu1"),
        )


class _Unit(HybridBlock):
    """Adds channels to its input; all units of a stage count their layers together."""

    def __init__(
        self,
        name: str,
        place: int,
        channels: int,
        growth: int,
        dropout: float,
        norm: Norm,
        act: str,
    ):
        super().__init__(prefix=f"{name}_unit{place}_")
        first, second, inner = 2 * place, 2 * place + 1, BOTTLENECK * growth
        self.branch = sequence(
            *_layers(name, first, channels, inner, 1, norm, act, first),
            *_layers(name, second, inner, growth, 3, norm, act, second),
        )
        if dropout:
            self.branch.add(nn.Dropout(dropout, prefix=f"{name}_dropout{place}_"))

    def hybrid_forward(self, F, data):
        """Map (B, C, H, W) to (B, C + growth, H, W)."""
        return F.concat(data, self.branch(data), dim=1)


def _layers(
    name: str,
    number: int,
    inputs: int,
    channels: int,
    kernel: int,
    norm: Norm,
    act: str,
    act_number: int,
) -> list[HybridBlock]:
    """Make a batch normalization, an activation of its `inputs` channels, and a convolution."""
    return [
        norm(f"{name}_batchnorm{number}", **GLUON_NORM),
        activation(act, f"{name}_prelu{act_number}", inputs),
        convolution(f"{name}_conv{number}", channels, kernel),
    ]
