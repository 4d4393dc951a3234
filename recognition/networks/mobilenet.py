"""MobileNet (v1) for faces, as insightface's ``fmobilenet`` names its parts: m1 and m05."""

from __future__ import annotations

import functools
from typing import Any

from mxnet.gluon.block import HybridBlock

from dsoftmax.recognition.networks.layers import Norm, ScalePixels, multiplied, sequence
from dsoftmax.recognition.networks.mobilefacenet import activated

_DEFAULTS: dict[str, Any] = {"embedding_size": 256, "output": "GDC", "input": 1}
NETWORKS = {
    "m1": {**_DEFAULTS, "multiplier": 1.0},
    "m05": {**_DEFAULTS, "multiplier": 0.5},
}
STEM_CHANNELS = 32
# Of each pair of convolutions after the stem: stride of the first one, which convolves each channel
# by itself, and channels of the second one, as a multiple of the stem's.
PAIRS = ((1, 2), (2, 4), (1, 4), (2, 8), (1, 8), (2, 16), *[(1, 16)] * 5, (2, 32), (1, 32))
HEAD_GROUPS = 512


class MobileNet(HybridBlock):
    """The layers that compute features.

    Parameters
    ----------
    norm : callable
        Makes a `BatchNorm`, given its name.
    act : str
        Kind of activation.
    input : int
        0 is a stem with stride 2, anything else one with stride 1.
    multiplier : float
        Factor of all numbers of channels.

    Attributes
    ----------
    head_groups : int
        Groups of channels in the heads that convolve each by itself. insightface makes 512 whatever
        the number of channels is, which m1 has twice as many of.
    """

    def __init__(self, norm: Norm, act: str, input: int, multiplier: float):
        super().__init__(prefix="")
        norm = functools.partial(norm, fix_gamma=True)
        stem = channels = multiplied(STEM_CHANNELS, multiplier)
        self.body = sequence(
            ScalePixels(), activated("conv_1", stem, 3, 2 if input == 0 else 1, 1, norm, act)
        )
        for number, (stride, factor) in enumerate(PAIRS, 2):
            name = f"conv_{number}"
            self.body.add(activated(f"{name}_dw", channels, 3, stride, channels, norm, act))
            channels = stem * factor
            self.body.add(activated(name, channels, 1, 1, 1, norm, act))
        self.head_groups = channels if channels % HEAD_GROUPS else HEAD_GROUPS

    def hybrid_forward(self, F, data):
        """Map pixels, (B, 3, H, W), to features, (B, C, h, w)."""
        return self.body(data)
