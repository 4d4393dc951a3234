"""How much memory a run will take, before it takes any."""

from __future__ import annotations

from typing import NamedTuple

import mxnet as mx
import numpy as np

from dsoftmax.losses.presets import PRESETS

FLOAT = 4
KEPT_BESIDE_OUTPUTS = 1.5  # gradients reuse memory; what BatchNorm and the engine keep does not
LOGITS_ALIVE = 3  # logits, probabilities, and a product on its way


class Estimate(NamedTuple):
    """Bytes, by what they are for; of one device, or of the host."""

    network: int
    activations: int
    classes: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_gigabytes(value)}" for name, value in self._asdict().items())
        return f"{_gigabytes(self.total)} ({parts})"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def of_device(
    symbol: mx.sym.Symbol,
    image_shape: tuple[int, int, int],
    batch_size: int,
    head: dict,
) -> Estimate:
    """Estimate what the busiest device will hold.

    Parameters
    ----------
    symbol : mx.sym.Symbol
        The network.
    image_shape : (3, height, width)
    batch_size : int
        Of one device.
    head : dict
        ``num_classes``, ``embedding_size``, ``batch_size`` (of all devices), ``devices`` and
        ``processes`` that share the classes, ``store``, ``chunk``, ``sample_rate`` or None,
        ``momentum``.
    """
    arguments, outputs, auxiliary = symbol.get_internals().infer_shape(
        data=(batch_size, *image_shape)
    )
    names = symbol.get_internals().list_arguments()
    parameters = sum(int(np.prod(shape)) for name, shape in zip(names, arguments) if name != "data")
    is_variable = set(names) | set(symbol.list_auxiliary_states())
    produced = sum(
        int(np.prod(shape))
        for name, shape in zip(symbol.get_internals().list_outputs(), outputs)
        if name not in is_variable
    )
    statistics = sum(int(np.prod(shape)) for shape in auxiliary)
    rows = -(-head["num_classes"] // head["devices"])
    used = max(round(rows * (head["sample_rate"] or 1)), 1)
    at_once = min(head["chunk"] or used, used)
    kept = rows if head["store"] == "device" else 0
    copies = 2 if head["momentum"] else 1
    gathered = 3 * used if head["sample_rate"] else 0  # rows in use, their gradient, the update's
    return Estimate(
        FLOAT * (3 * parameters + statistics),
        int(KEPT_BESIDE_OUTPUTS * FLOAT * produced),
        FLOAT * head["embedding_size"] * (copies * kept + gathered),
        LOGITS_ALIVE * FLOAT * head["batch_size"] * at_once,
    )


def of_host(head: dict) -> int:
    """Estimate what class weights in the memory of one process's host will take, in bytes."""
    if head["store"] != "host":
        return 0
    copies = 2 if head["momentum"] else 1
    rows = -(-head["num_classes"] // head["processes"])
    return FLOAT * copies * rows * head["embedding_size"]


def of_servers(head: dict) -> int:
    """Estimate what class weights on parameter servers will take of all of them, in bytes."""
    copies = 2  # momenta have their place, used or not
    return FLOAT * copies * head["num_classes"] * head["embedding_size"]


def check_fits(estimate: Estimate, free: int, where: str, sampled: bool) -> None:
    """Refuse a run that can't fit, with advice."""
    if estimate.total <= free:
        return
    advice = ["a smaller --per-batch-size"]
    if estimate.logits > estimate.total / 4:
        advice.append("--chunk 16384")
    if estimate.classes + estimate.logits > estimate.total / 2:
        advice.append("more devices with --class-parallel")
        if not sampled:
            advice.append("a loss with sampled classes (--loss dsoftmax_k)")
        else:
            advice.append("--store host")
    raise ValueError(
        f"the run needs about {estimate} on {where}, where {_gigabytes(free)} are free; try "
        f"{' or '.join(advice)}"
    )


def sampled_share(preset: str, options: dict) -> float | None:
    """Return which share of the classes a loss uses in a step; None is all."""
    negatives = PRESETS[preset].negatives
    if negatives in ("classes", "forest") or (negatives == "all" and "sample_rate" in options):
        return options.get("sample_rate", 1 / 64)
    return None
