"""MobileFaceNet, as insightface names its parts: y1 and y2."""

from __future__ import annotations

from typing import Any, Sequence

from mxnet.gluon.block import HybridBlock

from dsoftmax.recognition.networks.features import Features
from dsoftmax.recognition.networks.layers import (
    Norm,
    ScalePixels,
    activation,
    convolution,
    sequence,
)

_DEFAULTS: dict[str, Any] = {"output": "GDC", "multiplier": 1.0}
NETWORKS = {
    "y1": {**_DEFAULTS, "embedding_size": 128, "blocks": (1, 4, 6, 2)},
    "y2": {**_DEFAULTS, "embedding_size": 256, "blocks": (2, 8, 16, 4)},
}
EPSILON = 1e-3  # of batch normalization: insightface's symbol leaves MXNet's default here


class MobileFaceNet(Features):
    """Computes features by residual blocks that widen and narrow them.

    Parameters
    ----------
    norm, act
        See `Features`.
    blocks : sequence of int
        Residual blocks of each of the four stages; 1 in the first is a convolution alone.
    multiplier : float
        Factor of all numbers of channels.
    """

    gdc_weight = "fc1_weight"  # as in the published y1

    def __init__(self, norm: Norm, act: str, blocks: Sequence[int], multiplier: float):
        if len(blocks) != 4:
            raise ValueError(f"blocks must be 4 numbers, not {blocks!r}")
        c64, c128, c256, c512 = (round(multiplier * width) for width in (64, 128, 256, 512))

        def residuals(stage: int, channels: int, inner: int) -> list[HybridBlock]:
            return [
                Bottleneck(f"res_{stage}_block{place}_conv", channels, inner, 1, norm, act)
                for place in range(blocks[stage - 2])
            ]

        def halving(name: str, channels: int, inner: int) -> HybridBlock:
            return Bottleneck(f"{name}_conv", channels, inner, 2, norm, act)

        super().__init__(
            ScalePixels(),
            activated("conv_1", c64, 3, 2, 1, norm, act),
            *(
                [activated("conv_2_dw", c64, 3, 1, c64, norm, act)]
                if blocks[0] == 1
                else residuals(2, c64, c64)
            ),
            halving("dconv_23", c64, c128),
            *residuals(3, c64, c128),
            halving("dconv_34", c128, c256),
            *residuals(4, c128, c256),
            halving("dconv_45", c128, c512),
            *residuals(5, c128, c256),
            activated("conv_6sep", c512, 1, 1, 1, norm, act),
        )


class Bottleneck(HybridBlock):
    """Widen, convolve each channel, narrow; with stride 1 the input is added."""

    def __init__(self, name: str, channels: int, inner: int, stride: int, norm: Norm, act: str):
        super().__init__(prefix=f"{name}_")
        self._is_residual = stride == 1
        self.branch = sequence(
            activated(f"{name}_sep", inner, 1, 1, 1, norm, act),
            activated(f"{name}_dw", inner, 3, stride, inner, norm, act),
            convolution(f"{name}_proj_conv2d", channels, 1),
            norm(f"{name}_proj_batchnorm", epsilon=EPSILON),
        )

    def hybrid_forward(self, F, data):
        """Map (B, C, H, W) to the block's channels."""
        return self.branch(data) + data if self._is_residual else self.branch(data)


def activated(
    name: str, channels: int, kernel: int, stride: int, groups: int, norm: Norm, act: str
) -> HybridBlock:
    """Chain convolution, batch normalization and activation."""
    return sequence(
        convolution(f"{name}_conv2d", channels, kernel, stride, groups=groups),
        norm(f"{name}_batchnorm", epsilon=EPSILON),
        activation(act, f"{name}_relu"),
    )
