"""AdaFace: a margin that depends on the image's quality."""

from __future__ import annotations

import math

import mxnet as mx

from dsoftmax.losses.criteria.angles import angle_of
from dsoftmax.losses.criteria.base import BatchContext, Entangled


class AdaFace(Entangled):
    """A margin that grows with the embedding's length, a measure of the image's quality.

    φ = cos(θ_y - m q) - (m + m q), q being `h` times the length, standardised by the running mean
    and deviation of the lengths, clipped to ±1.

    Parameters
    ----------
    m : float
        Usually 0.4.
    h : float
        How strongly the length acts; 0.333.
    forget : float
        The part of the running mean and deviation that a batch replaces; 0.01.

    Examples
    --------
    >>> criterion = AdaFace(scale=64, m=0.4)
    >>> loss = criterion(z_y, n, None, quality)    # (B,), -1 to 1
    """

    def __init__(
        self, scale: float, m: float = 0.4, h: float = 0.333, forget: float = 0.01, **kwargs
    ):
        super().__init__(scale, **kwargs)
        self.m, self.h, self.forget = m, h, forget
        self.state = {"mean": 20.0, "deviation": 100.0}

    def arguments(self, batch: BatchContext) -> list[mx.nd.NDArray]:
        """Return the quality q of each sample, (B,)."""
        norm = batch.norm.detach().clip(0.001, 100)  # a measure, not to be trained
        self.follow("mean", norm.mean(), self.forget, batch)
        self.follow("deviation", _deviation(norm), self.forget, batch)
        mean, deviation = (self.number(name, norm.context) for name in ("mean", "deviation"))
        above = mx.nd.broadcast_sub(norm, mean.astype("float32"))
        quality = mx.nd.broadcast_div(self.h * above, (deviation + 0.001).astype("float32"))
        return [quality.clip(-1, 1)]

    def target(self, F, z_y, quality):
        """φ = cos(θ - m q) - (m + m q)."""
        angle = F.clip(angle_of(F, z_y) - self.m * quality, 0, math.pi)
        return F.cos(angle) - self.m * (1 + quality)

    def _describe(self) -> str:
        return f"{super()._describe()}, m={self.m:g}, h={self.h:g}"


def _deviation(values: mx.nd.NDArray) -> mx.nd.NDArray:
    return (values - values.mean()).square().mean().sqrt()
