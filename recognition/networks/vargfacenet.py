"""VarGFaceNet, as insightface names its parts."""

from __future__ import annotations

from typing import Any

from mxnet.gluon.block import HybridBlock

from dsoftmax.recognition.networks.features import Features
from dsoftmax.recognition.networks.iresnet import SqueezeExcitation
from dsoftmax.recognition.networks.layers import (
    Norm,
    ScalePixels,
    activation,
    convolution,
    multiplied,
    sequence,
)

NETWORKS: dict[str, dict[str, Any]] = {
    "vargfacenet": {"embedding_size": 512, "output": "J", "multiplier": 1.25, "se": 0}
}
STEM_CHANNELS = 32
STAGES = ((64, 3), (128, 7), (256, 4))  # channels and units of each
LAST_CHANNELS = 1024
LAST_KERNEL = 7  # of the feature map of an image of 112x112
GROUP = 8  # channels that are convolved together


class VarGFaceNet(Features):
    """Computes features by convolutions of groups of 8 channels; of 112x112 pixels, in one place.

    Parameters
    ----------
    norm, act
        See `Features`.
    multiplier : float
        Factor of all numbers of channels but the last ones; each product must be a multiple of 8.
    se : {0, 1}
        Whether units weight their channels by squeeze and excitation.
    """

    def __init__(self, norm: Norm, act: str, multiplier: float, se: int):
        stem, *widths = (
            multiplied(count, multiplier)
            for count in (STEM_CHANNELS, *(channels for channels, _ in STAGES))
        )
        uneven = [width for width in (stem, *widths) if width % GROUP]
        if uneven:
            raise ValueError(
                f"multiplier {multiplier} makes stages of {', '.join(map(str, uneven))} channels; "
                f"they must be multiples of {GROUP}"
            )
        super().__init__(
            ScalePixels(),
            *_layers("vargface_head_conv1", stem, 3, norm, act),
            _Unit("vargface_head_head_pooling", stem, stem, 2, 1, norm, act, se),
        )
        inputs = stem
        for stage, (width, (_, units)) in enumerate(zip(widths, STAGES), 2):
            name = f"vargface_stage_{stage}_unit"
            self.body.add(_MergingUnit(f"{name}_1", inputs, width, norm, act))
            for place in range(2, units + 1):
                self.body.add(_Unit(f"{name}_{place}", width, width, 1, 2, norm, act, se))
            inputs = width
        self.body.add(
            *_layers("embed_convx", LAST_CHANNELS, 1, norm, act),
            *_layers(
                "embed_convx_depthwise",
                LAST_CHANNELS,
                LAST_KERNEL,
                norm,
                None,
                padding=0,
                groups=LAST_CHANNELS // GROUP,
            ),
            *_layers("embed_convx_pointwise", LAST_CHANNELS // 2, 1, norm, act),
        )


class _Unit(HybridBlock):
    """Two separable convolutions and a shortcut, which is convolved where the shape changes."""

    def __init__(
        self,
        name: str,
        inputs: int,
        channels: int,
        stride: int,
        factor: int,
        norm: Norm,
        act: str,
        se: int,
    ):
        super().__init__(prefix=f"{name}_")
        options = {"factor": factor, "norm": norm, "act": act}
        self.branch = sequence(
            *_separable(f"{name}_sep1_data", inputs, channels, stride, **options),
            *_separable(f"{name}_sep2_data", channels, channels, 1, **options, is_linear=True),
        )
        if se:
            self.branch.add(SqueezeExcitation(f"{name}_se", channels, act, 4, "act1"))
        self.shortcut = None
        if stride > 1:
            shortcut = f"{name}_shortcut"
            self.shortcut = sequence(
                *_separable(shortcut, inputs, channels, stride, **options, is_linear=True)
            )
        self.act = activation(act, f"{name}_out_data_act")

    def hybrid_forward(self, F, data):
        """Map (B, C, H, W) to the unit's channels."""
        return self.act(self.branch(data) + (self.shortcut(data) if self.shortcut else data))


class _MergingUnit(HybridBlock):
    """Halves the image by two branches, whose sum is convolved once more, and a shortcut."""

    def __init__(self, name: str, inputs: int, channels: int, norm: Norm, act: str):
        super().__init__(prefix=f"{name}_")

        def linear(part: str, inputs: int, stride: int) -> HybridBlock:
            layers = _separable(
                f"{name}_{part}", inputs, channels, stride, 2, norm, act, is_linear=True
            )
            return sequence(*layers)

        self.first = linear("sep1_data_branch", inputs, 2)
        self.second = linear("sep2_data_branch", inputs, 2)
        self.merged = activation(act, f"{name}_sep1_data_act")
        self.last = linear("sep2_data", channels, 1)
        self.shortcut = linear("shortcut", inputs, 2)
        self.act = activation(act, f"{name}_out_data_act")

    def hybrid_forward(self, F, data):
        """Map (B, C, H, W) to the unit's channels."""
        merged = self.merged(self.first(data) + self.second(data))
        return self.act(self.last(merged) + self.shortcut(data))


def _separable(
    name: str,
    inputs: int,
    channels: int,
    stride: int,
    factor: int,
    norm: Norm,
    act: str,
    is_linear: bool = False,
) -> list[HybridBlock]:
    """Convolve groups of channels, whose number grows by a factor, and then single places."""
    groups = inputs // GROUP
    depthwise = f"{name}_conv2d_depthwise"
    return [
        *_layers(depthwise, factor * inputs, 3, norm, act, stride=stride, groups=groups),
        *_layers(f"{name}_conv2d_pointwise", channels, 1, norm, None if is_linear else act),
    ]


def _layers(
    name: str, channels: int, kernel: int, norm: Norm, act: str | None, **options: int
) -> list[HybridBlock]:
    """Make a convolution, its batch normalization and, if there is one, its activation."""
    layers = [convolution(name, channels, kernel, **options), norm(f"{name}_bn")]
    return layers + ([activation(act, f"{name}_act")] if act else [])
