"""MobileNet (v1) for faces, as insightface's ``fmobilenet`` names its parts: m1 and m05."""

from __future__ import annotations

import functools
from typing import Any

from dsoftmax.recognition.networks.features import Features
from dsoftmax.recognition.networks.layers import Norm, ScalePixels, multiplied
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


class MobileNet(Features):
    """Computes features by convolutions of single channels and of single places, in turns.

    Parameters
    ----------
    norm, act
        See `Features`.
    input : int
        0 is a stem with stride 2, anything else one with stride 1.
    multiplier : float
        Factor of all numbers of channels.
    """

    def __init__(self, norm: Norm, act: str, input: int, multiplier: float):
        norm = functools.partial(norm, fix_gamma=True)
        stem = channels = multiplied(STEM_CHANNELS, multiplier)
        super().__init__(
            ScalePixels(), activated("conv_1", stem, 3, 2 if input == 0 else 1, 1, norm, act)
        )
        for number, (stride, factor) in enumerate(PAIRS, 2):
            name = f"conv_{number}"
            self.body.add(activated(f"{name}_dw", channels, 3, stride, channels, norm, act))
            channels = stem * factor
            self.body.add(activated(name, channels, 1, 1, 1, norm, act))
        # insightface makes 512, whatever the number of channels is, which m1 has twice as many of.
        self.head_groups = channels if channels % HEAD_GROUPS else HEAD_GROUPS
