"""SphereFace and SphereFace-R: a factor of the angle."""

from __future__ import annotations

import math

import mxnet as mx

from dsoftmax.losses.criteria.angles import angle_of, multiply_angle
from dsoftmax.losses.criteria.base import BatchContext, Entangled, in_range


class SphereFace(Entangled):
    """A multiplicative margin on the angle: φ = (λ z_y + ψ(θ_y)) / (1 + λ).

    λ falls from `beta` to `beta_min` during training, or is 0 without annealing. m1 = 4 does not
    train without annealing; an m1 of about 1.5 does.

    Parameters
    ----------
    m1 : float
        4 as in the paper, or about 1.5.
    annealing : bool, optional
        By default for m1 above 2.
    beta, beta_min, gamma, power : float
        λ = max(beta_min, beta (1 + gamma step)^-power), insightface's defaults.

    Examples
    --------
    >>> criterion = SphereFace(scale=32, m1=4)
    >>> loss = criterion(z_y, n, None, mx.nd.array([5.0]))    # λ; without it, 0
    """

    def __init__(
        self,
        scale: float,
        m1: float = 4,
        annealing: bool | None = None,
        beta: float = 1000,
        beta_min: float = 5,
        gamma: float = 0.12,
        power: float = 1,
        **kwargs,
    ):
        super().__init__(scale, **kwargs)
        self.m1 = in_range("m1", m1, 1, 16)
        self.annealing = m1 > 2 if annealing is None else annealing
        self.beta, self.beta_min, self.gamma, self.power = beta, beta_min, gamma, power

    def annealed(self, step: int) -> float:
        """Return λ of a step."""
        return max(self.beta_min, self.beta * (1 + self.gamma * step) ** -self.power)

    def arguments(self, batch: BatchContext) -> list[mx.nd.NDArray]:
        """Return λ, (1,), where there is annealing."""
        if not self.annealing:
            return []
        return [mx.nd.full((1,), self.annealed(batch.step), ctx=batch.norm.context)]

    def target(self, F, z_y, annealed=None):
        """φ = (λ z + ψ) / (1 + λ)."""
        multiplied = multiply_angle(F, z_y, self.m1)
        if annealed is None:
            return multiplied
        return F.broadcast_div(F.broadcast_mul(z_y, annealed) + multiplied, 1 + annealed)

    def _describe(self) -> str:
        return f"{super()._describe()}, m1={self.m1:g}, annealing={self.annealing}"


class SphereFaceR(Entangled):
    """A multiplicative margin whose gradient is that of a plain softmax: φ = cos(min(m1 θ_y, π)).

    The paper's SphereFace-R v1 with its characteristic gradient detachment: the margin enters the
    probabilities, z_y has the slope 1. It needs no annealing.

    Parameters
    ----------
    m1 : float
        Usually 1.4 to 1.7.

    Examples
    --------
    >>> criterion = SphereFaceR(scale=30, m1=1.5)
    >>> loss = criterion(z_y, n)
    """

    def __init__(self, scale: float, m1: float = 1.5, **kwargs):
        super().__init__(scale, **kwargs)
        self.m1 = in_range("m1", m1, 1, 16)

    def target(self, F, z_y):
        """φ = cos(min(m1 θ, π)), with the gradient of z."""
        constant = F.BlockGrad(z_y)
        multiplied = F.cos(F.clip(self.m1 * angle_of(F, constant), 0, math.pi))
        return z_y + (multiplied - constant)

    def _describe(self) -> str:
        return f"{super()._describe()}, m1={self.m1:g}"
