"""What all criteria share: a Gluon loss of (z_y, n)."""

from __future__ import annotations

import math
from typing import NamedTuple

import mxnet as mx
import numpy as np
from mxnet.gluon.loss import Loss, _apply_weighting

from dsoftmax.losses.kernels import from_numpy
from dsoftmax.losses.reductions import LOG_SUM_EXP, Reduction


class BatchContext(NamedTuple):
    """What a criterion may know about the batch beside z_y and n."""

    step: int  # steps before this one
    norm: mx.nd.NDArray  # (B,) lengths of the embeddings, with their gradient
    inter_weight: float | None = None  # a factor of the inter-class loss; None for 1
    is_training: bool = True
    z_y: mx.nd.NDArray | None = None  # (B,) without a gradient, if the criterion follows it
    # The criterion's learned numbers, (1,) each, that receive the gradient of this batch.
    learned: dict[str, mx.nd.NDArray] | None = None


def softplus(F, x):
    """log(1 + e^x), without overflow."""
    return F.Activation(x, act_type="softrelu")


def in_range(name: str, value: float, low: float, high: float) -> float:
    """Return an option, or refuse a value out of its range."""
    if not low <= value <= high:
        raise ValueError(f"{name} must lie from {low:g} to {high:.4g}, not {value!r}")
    return value


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
    follows_target = False  # whether `reduction` looks at z_y
    learned: tuple[str, ...] = ()  # the numbers of the state that the trainer updates

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

    def reduction(self, batch: BatchContext) -> Reduction:
        """Return how n is made of the logits of the negatives, for each batch."""
        return LOG_SUM_EXP

    def prepare(self, negatives: int) -> None:
        """Choose what depends on how many negatives a sample has; called before every step."""

    def number(self, name: str, context: mx.Context) -> mx.nd.NDArray:
        """Return a number of the state as an array, (1,) float64."""
        value = self.state[name]
        if isinstance(value, mx.nd.NDArray):
            return value.as_in_context(context)
        return from_numpy(np.array([value]), context, "float64")  # nd.full changes its last digit

    def learned_number(self, name: str, batch: BatchContext) -> mx.nd.NDArray:
        """Return a learned number, (1,), as an array that receives the gradient of a batch."""
        if batch.learned is None:  # without a head
            return self.number(name, batch.norm.context).astype("float32")
        return batch.learned[name]

    def follow(self, name: str, value: mx.nd.NDArray, forget: float, batch: BatchContext) -> None:
        """Let a running mean of the state follow a batch's value, (1,).

        An evaluation, and a batch that the trainer will refuse, leave no trace.
        """
        if batch.is_training:
            is_finite = mx.nd.contrib.isfinite(batch.norm.detach()).min()
            before = self.number(name, value.context)
            after = before + forget * (value.astype("float64") - before)
            self.state[name] = mx.nd.where(is_finite, after, before)

    def learn(self, gradients: dict[str, mx.nd.NDArray], lr: float, momentum: float) -> None:
        """Update learned numbers by their gradients, (1,) each: SGD without weight decay."""
        for name, gradient in gradients.items():
            context, speed = gradient.context, f"{name}_momentum"
            self.state.setdefault(speed, 0.0)
            moved = momentum * self.number(speed, context) - lr * gradient.astype("float64")
            self.state[speed] = moved
            self.state[name] = self.number(name, context) + moved

    def read_state(self) -> dict[str, float]:
        """Return the numbers of the state, to be saved."""
        return {
            name: float(value.asscalar() if isinstance(value, mx.nd.NDArray) else value)
            for name, value in self.state.items()
        }

    def read_number(self, name: str) -> float:
        """Return a number of the state; 0 if the first batch is still to choose it."""
        return self.read_state().get(name, 0.0)

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


class Dissected(Criterion):
    """An intra-class and an inter-class loss of their own.

    A subclass defines both. They are given the learned numbers as further inputs, (1,) each.
    """

    dissected = True

    def intra(self, F, z_y, *learned):
        """Return the intra-class loss, (B,)."""
        raise NotImplementedError(f"{type(self).__name__} must define intra(F, z_y)")

    def inter(self, F, z_y, n, *learned):
        """Return the inter-class loss, (B,); it may look at z_y but sends it no gradient."""
        raise NotImplementedError(f"{type(self).__name__} must define inter(F, z_y, n)")

    def arguments(self, batch: BatchContext) -> list[mx.nd.NDArray]:
        """Return the learned numbers, and the weight of the inter part where it has one."""
        learned = [self.learned_number(name, batch) for name in self.learned]
        if batch.inter_weight is None:
            return learned
        return [*learned, mx.nd.full((1,), batch.inter_weight, ctx=batch.norm.context)]

    def parts(self, F, z_y, n, *arguments):
        """Return the intra-class and the inter-class loss, (B,) each."""
        count = len(self.learned)
        learned, inter_weight = arguments[:count], arguments[count:]
        intra = self.intra(F, z_y, *learned)
        inter = self.inter(F, F.BlockGrad(z_y), n, *learned)
        return intra, F.broadcast_mul(inter, inter_weight[0]) if inter_weight else inter
