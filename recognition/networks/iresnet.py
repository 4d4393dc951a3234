"""insightface's residual networks (its ``fresnet``) of basic units: r18 to r269."""

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

CHANNELS = (64, 64, 128, 256, 512)  # of the stem and of each stage
UNITS_PER_STAGE = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    49: (3, 4, 14, 3),
    50: (3, 4, 14, 3),
    74: (3, 6, 24, 3),
    90: (3, 8, 30, 3),
    98: (3, 4, 38, 3),
    99: (3, 8, 35, 3),
    100: (3, 13, 30, 3),
    101: (3, 4, 23, 3),
    124: (3, 13, 40, 5),
    134: (3, 10, 50, 3),
    136: (3, 13, 48, 3),
    140: (3, 15, 48, 3),
    152: (3, 8, 36, 3),
    160: (3, 24, 49, 3),
    200: (3, 24, 36, 3),
    269: (3, 30, 48, 8),
}
_DEFAULTS: dict[str, Any] = {
    "embedding_size": 512,
    "output": "E",
    "se": 0,
    "unit": 3,
    "input": 1,
    "multiplier": 1.0,
}
NETWORKS = {
    **{
        f"r{depth}": {**_DEFAULTS, "units_per_stage": units}
        for depth, units in UNITS_PER_STAGE.items()
    },
    "r100fc": {**_DEFAULTS, "units_per_stage": UNITS_PER_STAGE[100], "output": "FC"},
    "r50v1": {**_DEFAULTS, "units_per_stage": UNITS_PER_STAGE[50], "unit": 1},
}


class IResNet(Features):
    """Computes features by residual units.

    Parameters
    ----------
    norm, act
        See `Features`.
    units_per_stage : sequence of int
        Number of units in each of the four stages, each of which halves the image.
    se : {0, 1}
        Whether units weight their channels by squeeze and excitation.
    unit : {1, 2, 3}
        1: activation after the sum; 2: before each convolution; 3: insightface's improved unit.
    input : {0, 1, 2}
        Stem: 0 is 7x7 with stride 2, 1 is 3x3, 2 is 3x3 on pixels scaled by a batch normalization.
    multiplier : float
        Factor of all numbers of channels.
    """

    def __init__(
        self,
        norm: Norm,
        act: str,
        units_per_stage: Sequence[int],
        se: int,
        unit: int,
        input: int,
        multiplier: float,
    ):
        if input not in (0, 1, 2):
            raise ValueError(f"input must be one of 0, 1, 2, not {input!r}")
        if unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(map(str, UNITS))}, not {unit!r}")
        stem, *channels = (round(multiplier * count) for count in CHANNELS)
        if len(units_per_stage) != len(channels):
            raise ValueError(
                f"units_per_stage must be {len(channels)} numbers, not {units_per_stage!r}"
            )
        make_unit = UNITS[unit]
        if unit == 1 and input == 0:
            make_unit = EarlyStridePostActivationUnit
        super().__init__(
            norm("bn_data", fix_gamma=True) if input == 2 else ScalePixels(),
            convolution("conv0", stem, 7, 2) if input == 0 else convolution("conv0", stem, 3),
            norm("bn0"),
            activation(act, "relu0"),
        )
        for stage, (width, count) in enumerate(zip(channels, units_per_stage), 1):
            for place in range(1, count + 1):
                name = f"stage{stage}_unit{place}"
                self.body.add(make_unit(name, width, place == 1, norm, act, se))


class _Unit(HybridBlock):
    """Two 3x3 convolutions and a shortcut; the first unit of a stage halves the image.

    Parameters
    ----------
    name : str
    channels : int
    is_first : bool
    norm, act
        See `IResNet`.
    se : bool
    """

    first_stride = 1  # of the convolutions in a unit that halves the image
    second_stride = 2

    def __init__(self, name: str, channels: int, is_first: bool, norm: Norm, act: str, se: bool):
        super().__init__(prefix=f"{name}_")
        strides = (self.first_stride, self.second_stride) if is_first else (1, 1)
        self.conv1 = convolution(f"{name}_conv1", channels, 3, strides[0])
        self.conv2 = convolution(f"{name}_conv2", channels, 3, strides[1])
        self.bn1 = norm(f"{name}_bn1")
        self.bn2 = norm(f"{name}_bn2")
        self.relu1 = activation(act, f"{name}_relu1")
        self.se = SqueezeExcitation(f"{name}_se", channels, act) if se else None
        self.shortcut = self._make_shortcut(name, channels, norm) if is_first else None

    def _make_shortcut(self, name: str, channels: int, norm: Norm) -> HybridBlock:
        return sequence(convolution(f"{name}_conv1sc", channels, 1, 2), norm(f"{name}_sc"))

    def _join(self, branch, data):
        """Sum the weighted branch and the shortcut of `data`."""
        weighted = self.se(branch) if self.se else branch
        return weighted + (self.shortcut(data) if self.shortcut else data)


class PostActivationUnit(_Unit):
    """Computes conv-BN-act-conv-BN and activates the sum."""

    def __init__(self, name: str, channels: int, is_first: bool, norm: Norm, act: str, se: bool):
        super().__init__(name, channels, is_first, norm, act, se)
        self.relu3 = activation(act, f"{name}_relu3")

    def hybrid_forward(self, F, data):
        """Map (B, C, H, W) to the unit's channels."""
        branch = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(data)))))
        return self.relu3(self._join(branch, data))


class EarlyStridePostActivationUnit(PostActivationUnit):
    """Strides in its first convolution, for networks whose stem has a stride, too."""

    first_stride = 2
    second_stride = 1


class PreActivationUnit(_Unit):
    """Computes BN-act-conv-BN-act-conv; the shortcut begins after the first activation."""

    first_stride = 2
    second_stride = 1

    def __init__(self, name: str, channels: int, is_first: bool, norm: Norm, act: str, se: bool):
        super().__init__(name, channels, is_first, norm, act, se)
        self.relu2 = activation(act, f"{name}_relu2")

    def _make_shortcut(self, name: str, channels: int, norm: Norm) -> HybridBlock:
        return convolution(f"{name}_sc", channels, 1, 2)

    def hybrid_forward(self, F, data):
        """Map (B, C, H, W) to the unit's channels."""
        activated = self.relu1(self.bn1(data))
        branch = self.conv2(self.relu2(self.bn2(self.conv1(activated))))
        return self._join(branch, activated if self.shortcut else data)


class ImprovedUnit(_Unit):
    """Computes BN-conv-BN-act-conv-BN and leaves the sum as it is."""

    def __init__(self, name: str, channels: int, is_first: bool, norm: Norm, act: str, se: bool):
        super().__init__(name, channels, is_first, norm, act, se)
        self.bn3 = norm(f"{name}_bn3")

    def hybrid_forward(self, F, data):
        """Map (B, C, H, W) to the unit's channels."""
        branch = self.bn3(self.conv2(self.relu1(self.bn2(self.conv1(self.bn1(data))))))
        return self._join(branch, data)


UNITS = {1: PostActivationUnit, 2: PreActivationUnit, 3: ImprovedUnit}


class SqueezeExcitation(HybridBlock):
    """Weights channels by 0 to 1, computed from their means."""

    def __init__(
        self, name: str, channels: int, act: str, reduction: int = 16, act_name: str = "relu1"
    ):
        super().__init__(prefix=f"{name}_")
        self.weigh = sequence(
            convolution(f"{name}_conv1", max(1, channels // reduction), 1, bias=True),
            activation(act, f"{name}_{act_name}"),
            convolution(f"{name}_conv2", channels, 1, bias=True),
        )

    def hybrid_forward(self, F, data):
        """Weight the channels of `data`, (B, C, H, W)."""
        means = F.Pooling(data, global_pool=True, pool_type="avg", kernel=(1, 1), name="pool1")
        return F.broadcast_mul(data, F.sigmoid(self.weigh(means), name="sigmoid"))
