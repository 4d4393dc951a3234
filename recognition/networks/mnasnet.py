"""MnasNet for faces, as insightface's ``fmnasnet`` names its parts: mnas, mnas05 and mnas025."""

from __future__ import annotations

from typing import Any, NamedTuple

from mxnet.gluon.block import HybridBlock

from dsoftmax.recognition.networks.features import Features
from dsoftmax.recognition.networks.layers import (
    GLUON_NORM,
    Norm,
    ScalePixels,
    activation,
    convolution,
    multiplied,
    sequence,
)

_DEFAULTS: dict[str, Any] = {"embedding_size": 256, "output": "GDC"}
NETWORKS = {
    "mnas": {**_DEFAULTS, "multiplier": 1.0},
    "mnas05": {**_DEFAULTS, "multiplier": 0.5},
    "mnas025": {**_DEFAULTS, "multiplier": 0.25},
}
PREFIX = "mnasnet0"
STEM_CHANNELS, FIRST_CHANNELS, LAST_CHANNELS = 32, 16, 1024


class _Stage(NamedTuple):
    name: str
    expansion: int  # inner channels, as a multiple of the input's
    channels: int
    blocks: int
    stride: int  # of the first block
    kernel: int  # of the first block; the others have 3


STAGES = (
    _Stage("stage2", 3, 24, 3, 2, 3),
    _Stage("stage3", 3, 40, 3, 2, 5),
    _Stage("stage4_1", 6, 80, 3, 2, 5),
    _Stage("stage4_2", 6, 96, 2, 1, 3),
    _Stage("stage5_1", 6, 192, 4, 2, 5),
    _Stage("stage5_2", 6, 320, 1, 1, 3),
)


class MNasNet(Features):
    """Computes features by blocks that widen and narrow them.

    Parameters
    ----------
    norm, act
        See `Features`.
    multiplier : float
        Factor of all numbers of channels.
    """

    def __init__(self, norm: Norm, act: str, multiplier: float):
        stem, channels, last = (
            multiplied(count, multiplier)
            for count in (STEM_CHANNELS, FIRST_CHANNELS, LAST_CHANNELS)
        )
        first = f"{PREFIX}_stage1_sepconv0"
        super().__init__(
            ScalePixels(),
            *_layers(f"{PREFIX}_stage1_conv0", 0, stem, 3, norm, act),
            *_layers(first, 0, stem, 3, norm, act, groups=stem),
            *_layers(first, 1, channels, 1, norm, act),
        )
        for stage in STAGES:
            width = multiplied(stage.channels, multiplier)
            for place in range(stage.blocks):
                name = f"{PREFIX}_{stage.name}_expandedconv{place}"
                inner = stage.expansion * channels
                stride, kernel = (1, 3) if place else (stage.stride, stage.kernel)
                # The first block of a stage adds nothing, even where the shapes would agree.
                self.body.add(_Bottleneck(name, width, inner, kernel, stride, place > 0, norm, act))
                channels = width
        self.body.add(*_layers(f"{PREFIX}_stage5_3", 0, last, 1, norm, act))


class _Bottleneck(HybridBlock):
    """Widen, convolve each channel, narrow."""

    def __init__(
        self,
        name: str,
        channels: int,
        inner: int,
        kernel: int,
        stride: int,
        is_residual: bool,
        norm: Norm,
        act: str,
    ):
        super().__init__(prefix=f"{name}_")
        self._is_residual = is_residual
        self.branch = sequence(
            *_layers(f"{name}_expand", 0, inner, 1, norm, act),
            *_layers(f"{name}_dwise", 0, inner, kernel, norm, act, stride, groups=inner),
            *_layers(f"{name}_linear", 0, channels, 1, norm, None),
        )

    def hybrid_forward(self, F, data):
        """Map (B, C, H, W) to the block's channels."""
        return self.branch(data) + data if self._is_residual else self.branch(data)


def _layers(
    name: str,
    number: int,
    channels: int,
    kernel: int,
    norm: Norm,
    act: str | None,
    stride: int = 1,
    groups: int = 1,
) -> list[HybridBlock]:
    """Make a convolution, its batch normalization and, if there is one, its activation."""
    layers = [
        convolution(f"{name}_conv{number}", channels, kernel, stride, groups=groups),
        norm(f"{name}_batchnorm{number}", **GLUON_NORM),
    ]
    return layers + ([activation(act, f"{name}_prelu{number}", channels)] if act else [])
