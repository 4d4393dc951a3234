"""The criteria: each loss of the family as a few lines on two numbers per sample.

`z_y` is the cosine with the sample's own class, `n` the log-sum-exp of the scaled cosines with its
negatives. A criterion does not know which negatives these are, where their weights live, or how n
was computed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mxnet as mx
from mxnet.gluon.loss import Loss, _apply_weighting

# How far from 1 the float32 cosine of a vector with itself may be.
ROUNDING = 5e-7


class BatchContext(NamedTuple):
    """What a criterion may know about the batch beside z_y and n."""

    step: int  # steps before this one
    norm: mx.nd.NDArray  # (B,) lengths of the embeddings, with their gradient
    inter_weight: float | None = None  # a factor of the inter-class loss; None for 1
    is_training: bool = True


def softplus(F, x):
    """log(1 + e^x), without overflow."""
    return F.Activation(x, act_type="softrelu")


class Criterion(Loss):
    """Base of all criteria: a Gluon loss of (z_y, n).

    A subclass defines `parts`: the intra-class and the inter-class loss of each sample. If the two
    are entangled, the whole loss is the intra part and the inter part is 0.

    Parameters
    ----------
    scale : float
        The scale s of the cosines; usually 16 to 64.
    weight, batch_axis
        As for every ``gluon.loss.Loss``.

    Inputs:
        - **z_y**: (B,) cosines with each sample's own class.
        - **n**: (B,) log-sum-exp of the scaled cosines with the negatives.
        - **sample_weight**: (B,), optional.
        - the arrays of `arguments`, (1,) or (B,) each.

    Outputs:
        - **loss**: (B,).
    """

    dissected = False

    def __init__(self, scale: float, weight=None, batch_axis: int = 0, **kwargs):
        super().__init__(weight, batch_axis, **kwargs)
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be a positive number, not {scale!r}")
        self.scale = float(scale)
        # Numbers that are saved and loaded with the trainer's states. One that a device computes
        # stays there, as an array (1,), because reading it would wait for the device.
        self.state: dict[str, float | mx.nd.NDArray] = {}

    def arguments(self, batch: BatchContext) -> list[mx.nd.NDArray]:
        """Return the arrays that `parts` needs beside z_y and n, for each batch.

        Plain numbers won't do: a hybridized graph would keep those of its first call.
        """
        return []

    def read_state(self) -> dict[str, float]:
        """Return the numbers of the state, to be saved."""
        return {
            name: float(value.asscalar() if isinstance(value, mx.nd.NDArray) else value)
            for name, value in self.state.items()
        }

    def parts(self, F, z_y, n, *arguments):
        """Return the intra-class and the inter-class loss, (B,) each."""
        raise NotImplementedError(f"{type(self).__name__} must define parts(F, z_y, n)")

    def inter_floor(self, n: float) -> float | None:
        """Return the inter loss of an n; None where it depends on more than n."""
        return None

    def hybrid_forward(self, F, z_y, n, sample_weight=None, *arguments):
        """Compute the loss of each sample."""
        intra, inter = self.parts(F, z_y, n, *arguments)
        return _apply_weighting(F, intra + inter, self._weight, sample_weight)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._describe()})"

    def _describe(self) -> str:
        return f"scale={self.scale:g}"


class Entangled(Criterion):
    """Softmax with a margin: softplus(n - s φ(z_y)). A subclass gives φ, the `target`."""

    def target(self, F, z_y, *arguments):
        """Return φ(z_y), (B,), which takes the place of the target cosine."""
        raise NotImplementedError(f"{type(self).__name__} must define target(F, z_y)")

    def parts(self, F, z_y, n, *arguments):
        """Return the whole loss and 0."""
        loss = softplus(F, n - self.scale * self.target(F, z_y, *arguments))
        return loss, F.zeros_like(loss)

    def termination_point(self, n: float) -> float:
        """Say at which z_y the intra-class gradient dies away: where s φ(z_y) = n.

        The paper's d = log M / s, and its counterparts with a margin, limited to ±1: with a smaller
        n the gradient is never strong, with a larger one it never ends.
        """
        low, high = -1.0, 1.0
        if self._target_of(high) * self.scale <= n:
            return 1.0
        if self._target_of(low) * self.scale >= n:
            return -1.0
        for _ in range(60):  # φ grows with z_y: bisection
            middle = (low + high) / 2
            if self._target_of(middle) * self.scale < n:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def _target_of(self, z_y: float) -> float:
        arguments = self.arguments(BatchContext(step=1 << 30, norm=mx.nd.ones((1,))))
        return float(self.target(mx.nd, mx.nd.array([z_y]), *arguments).asscalar())


class Softmax(Entangled):
    """Softmax: on cosines NormFace's, on inner products (with scale 1) the plain one.

    Examples
    --------
    >>> criterion = Softmax(scale=32)
    >>> loss = criterion(z_y, n)
    """

    def target(self, F, z_y):
        """φ(z) = z."""
        return z_y


class CosFace(Entangled):
    """An additive margin on the cosine: φ(z) = z - m3.

    Parameters
    ----------
    m3 : float
        Usually 0.35 to 0.4.

    Examples
    --------
    >>> criterion = CosFace(scale=64, m3=0.35)
    >>> loss = criterion(z_y, n)
    """

    def __init__(self, scale: float, m3: float = 0.35, **kwargs):
        super().__init__(scale, **kwargs)
        self.m3 = m3

    def target(self, F, z_y):
        """φ(z) = z - m3."""
        return z_y - self.m3

    def _describe(self) -> str:
        return f"{super()._describe()}, m3={self.m3:g}"


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


class ArcFace(Entangled):
    """An additive margin on the angle: φ = cos(θ_y + m2).

    Parameters
    ----------
    m2 : float
        In radians, usually 0.3 to 0.5.
    detach : bool
        Give z_y the gradient of a plain softmax, as insightface's PyTorch code does, instead of
        the true one.

    Examples
    --------
    >>> criterion = ArcFace(scale=64, m2=0.5)
    >>> loss = criterion(z_y, n)
    """

    def __init__(self, scale: float, m2: float = 0.5, detach: bool = False, **kwargs):
        super().__init__(scale, **kwargs)
        self.m2 = float(_in_range("m2", m2, 0, math.pi / 2))
        self.detach = detach

    def target(self, F, z_y):
        """φ = cos(θ_y + m2)."""
        if not self.detach:
            return add_angle(F, z_y, self.m2)
        constant = F.BlockGrad(z_y)
        return z_y + (add_angle(F, constant, self.m2) - constant)

    def _describe(self) -> str:
        return f"{super()._describe()}, m2={self.m2:g}{', detach=True' * self.detach}"


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
        self.m1 = _in_range("m1", m1, 1, 16)
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


class Combined(Entangled):
    """All three margins: φ = cos(m1 θ_y + m2) - m3.

    Parameters
    ----------
    m1, m2, m3 : float
        insightface's are 1, 0.3 and 0.2.

    Examples
    --------
    >>> criterion = Combined(scale=64, m1=1, m2=0.3, m3=0.2)
    >>> loss = criterion(z_y, n)
    """

    def __init__(self, scale: float, m1: float = 1, m2: float = 0.3, m3: float = 0.2, **kwargs):
        super().__init__(scale, **kwargs)
        self.m1 = _in_range("m1", m1, 1, 16)
        self.m2 = float(_in_range("m2", m2, 0, math.pi / 2))
        self.m3 = m3

    def target(self, F, z_y):
        """φ = cos(m1 θ + m2) - m3."""
        if self.m1 == 1:
            return add_angle(F, z_y, self.m2) - self.m3
        angle = self.m1 * angle_of(F, z_y) + self.m2
        k = F.BlockGrad(F.floor(angle / math.pi))
        sign = 1 - 2 * (k - 2 * F.floor(k / 2))
        return sign * F.cos(angle) - 2 * k - self.m3

    def _describe(self) -> str:
        return f"{super()._describe()}, m1={self.m1:g}, m2={self.m2:g}, m3={self.m3:g}"


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
        if batch.is_training:
            # A batch that the trainer will refuse leaves no trace.
            is_finite = mx.nd.contrib.isfinite(batch.norm.detach()).min()
            for name, value in (("mean", norm.mean()), ("deviation", _deviation(norm))):
                before = self._state_on(norm.context, name)
                after = before + self.forget * (value.astype("float64") - before)
                self.state[name] = mx.nd.where(is_finite, after, before)
        mean, deviation = (self._state_on(norm.context, name) for name in ("mean", "deviation"))
        above = mx.nd.broadcast_sub(norm, mean.astype("float32"))
        quality = mx.nd.broadcast_div(self.h * above, (deviation + 0.001).astype("float32"))
        return [quality.clip(-1, 1)]

    def _state_on(self, context: mx.Context, name: str) -> mx.nd.NDArray:
        """Return a number of the state as an array, (1,) float64."""
        value = self.state[name]
        if isinstance(value, mx.nd.NDArray):
            return value.as_in_context(context)
        return mx.nd.full((1,), value, ctx=context, dtype="float64")

    def target(self, F, z_y, quality):
        """φ = cos(θ - m q) - (m + m q)."""
        angle = F.clip(angle_of(F, z_y) - self.m * quality, 0, math.pi)
        return F.cos(angle) - self.m * (1 + quality)

    def _describe(self) -> str:
        return f"{super()._describe()}, m={self.m:g}, h={self.h:g}"


def _deviation(values: mx.nd.NDArray) -> mx.nd.NDArray:
    return (values - values.mean()).square().mean().sqrt()


class DSoftmax(Criterion):
    """Dissected softmax: softplus(s (d - z_y)) + softplus(n).

    The paper's ε is e^{s d}, which would overflow; d is where the intra-class gradient ends.

    Parameters
    ----------
    d : float
        Termination point of the intra-class part; the paper's best is 0.9.

    Examples
    --------
    >>> criterion = DSoftmax(scale=32, d=0.9)
    >>> loss = criterion(z_y, n)
    """

    dissected = True

    def __init__(self, scale: float, d: float = 0.9, **kwargs):
        super().__init__(scale, **kwargs)
        self.d = float(d)

    def arguments(self, batch: BatchContext) -> list[mx.nd.NDArray]:
        """Return the weight of the inter part, (1,), where it has one."""
        if batch.inter_weight is None:
            return []
        return [mx.nd.full((1,), batch.inter_weight, ctx=batch.norm.context)]

    def inter(self, F, z_y, n):
        """Return the inter-class loss, (B,); it may look at z_y but sends it no gradient."""
        return softplus(F, n)

    def inter_floor(self, n: float) -> float | None:
        """Return the inter loss of an n."""
        return math.log1p(math.exp(n))

    def parts(self, F, z_y, n, inter_weight=None):
        """Return the intra-class and the inter-class loss, (B,) each."""
        intra = softplus(F, self.scale * (self.d - z_y))
        inter = self.inter(F, F.BlockGrad(z_y), n)
        return intra, inter if inter_weight is None else F.broadcast_mul(inter, inter_weight)

    def termination_point(self, n: float) -> float:
        """Say at which z_y the intra-class gradient dies away: at d, whatever n."""
        return self.d

    def _describe(self) -> str:
        return f"{super()._describe()}, d={self.d:g}"


class Hybrid(DSoftmax):
    """D-Softmax's intra part with the inter part of another loss, which looks at z_y too."""

    def inter_floor(self, n: float) -> None:
        """Return None: the inter loss has no floor."""
        return


class DSoftmaxSoftmax(Hybrid):
    """D-Softmax's intra part with the inter gradient of softmax: softplus(n - s stop(z_y)).

    Examples
    --------
    >>> criterion = DSoftmaxSoftmax(scale=32, d=0.9)
    >>> loss = criterion(z_y, n)
    """

    def inter(self, F, z_y, n):
        """Return softmax's loss as a function of n alone."""
        return softplus(F, n - self.scale * z_y)


class DSoftmaxArcFace(Hybrid):
    """D-Softmax's intra part with ArcFace's inter gradient: softplus(n - s cos(stop(θ_y) + m2)).

    Parameters
    ----------
    m2 : float
        In radians, usually 0.5.

    Examples
    --------
    >>> criterion = DSoftmaxArcFace(scale=32, d=0.9, m2=0.5)
    >>> loss = criterion(z_y, n)
    """

    def __init__(self, scale: float, d: float = 0.9, m2: float = 0.5, **kwargs):
        super().__init__(scale, d, **kwargs)
        self.m2 = float(_in_range("m2", m2, 0, math.pi / 2))

    def inter(self, F, z_y, n):
        """Return ArcFace's loss as a function of n alone."""
        return softplus(F, n - self.scale * add_angle(F, z_y, self.m2))

    def _describe(self) -> str:
        return f"{super()._describe()}, m2={self.m2:g}"


def _in_range(name: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        raise ValueError(f"{name} must lie from {low:g} to {high:.4g}, not {value!r}")
    return value
