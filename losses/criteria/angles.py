"""Functions of an angle that is given by its cosine, with finite gradients at ±1."""

from __future__ import annotations

import math

# How far from 1 the float32 cosine of a vector with itself may be.
ROUNDING = 5e-7


def angle_of(F, cosine):
    """θ of cos θ; 0 or π, with no gradient, where float32 can't tell the cosine from ±1."""
    inside = F.arccos(F.clip(cosine, -1 + ROUNDING, 1 - ROUNDING))
    is_end = F.abs(cosine) > 1 - ROUNDING
    return F.where(is_end, math.pi / 2 * (1 - F.sign(F.BlockGrad(cosine))), inside)


def sine_of(F, cosine):
    """Sin θ of cos θ; 0, with no gradient, where float32 can't tell the cosine from ±1."""
    squared = 1 - F.square(cosine)
    is_end = squared < 2 * ROUNDING
    return F.where(is_end, F.zeros_like(cosine), F.sqrt(F.maximum(squared, 2 * ROUNDING)))


def add_angle(F, cosine, angle: float):
    """cos(θ + angle) from cos θ, for an angle in [0, π/2], by the addition theorem.

    Beyond θ + angle = π it continues as cos θ - angle sin(angle), which keeps falling. It needs no
    arccos, whose gradient is infinite at ±1.

    Parameters
    ----------
    cosine : (B,)
    angle : float
    """
    turned = cosine * math.cos(angle) - sine_of(F, cosine) * math.sin(angle)
    is_inside = cosine > math.cos(math.pi - angle)
    return F.where(is_inside, turned, cosine - angle * math.sin(angle))


def add_angles(F, cosine, angle):
    """Do as `add_angle` with an angle per sample, (B,)."""
    turned = cosine * F.cos(angle) - sine_of(F, cosine) * F.sin(angle)
    return F.where(cosine > -F.cos(angle), turned, cosine - angle * F.sin(angle))


def multiply_angle(F, cosine, factor: float):
    """ψ(θ) of SphereFace: cos(factor θ), continued so that it falls over the whole of [0, π].

    ψ = (-1)^k cos(m θ) - 2 k with k = floor(m θ / π). For a whole m, cos(m θ) is the Chebyshev
    polynomial of cos θ: no arccos.
    """
    if factor == int(factor):
        before, multiplied = F.ones_like(cosine), cosine
        for _ in range(int(factor) - 1):
            before, multiplied = multiplied, 2 * cosine * multiplied - before
    else:
        multiplied = F.cos(factor * angle_of(F, cosine))
    k = F.zeros_like(cosine)
    for border in range(1, math.ceil(factor)):  # k counts the multiples of π that m θ is beyond
        k = k + (cosine < math.cos(border * math.pi / factor))
    k = F.BlockGrad(k)
    sign = 1 - 2 * (k - 2 * F.floor(k / 2))
    return sign * multiplied - 2 * k
