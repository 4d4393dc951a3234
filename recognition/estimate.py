"""How much memory a run will take, before it takes any."""

from __future__ import annotations

from typing import NamedTuple

import mxnet as mx
import numpy as np

from dsoftmax.losses.negatives import CACHED_CLASSES
from dsoftmax.losses.stores import find_store
from dsoftmax.losses.stores.base import FLOAT_BYTES, StoreMemory

PROCESS_BYTES = 430_000_000  # of Python, MXNet, OpenCV and their like, measured
KEPT_BESIDE_OUTPUTS = (
    1.6  # measured: gradients reuse memory; what BatchNorm and the engine keep does not
)


class Estimate(NamedTuple):
    """Bytes on a device, or on a machine, by what they are for."""

    network: int
    activations: int
    classes: int
    logits: int

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {gigabytes(value)}" for name, value in self._asdict().items())
        return f"{gigabytes(self.total)} ({parts})"


class HeadSize(NamedTuple):
    """What decides how much memory class weights and logits take.

    Attributes
    ----------
    num_classes, embedding_size : int
        K and D.
    batch_size : int
        Of all devices of all processes, and of all micro-batches.
    devices, processes : int
        How many share the classes; devices are counted over all processes.
    store : str
        The name of a store.
    dtype : str
        What it keeps class weights as.
    chunk : int, optional
        Classes at a time.
    sampled_share : float, optional
        The share of the classes that a step uses; None is all.
    momentum : float
    keeps_logits : bool
        Whether the logits of all classes are kept; they are not for several micro-batches.
    """

    num_classes: int
    embedding_size: int
    batch_size: int
    devices: int = 1
    processes: int = 1
    store: str = "device"
    dtype: str = "float32"
    chunk: int | None = None
    sampled_share: float | None = None
    momentum: float = 0.0
    keeps_logits: bool = True

    @property
    def used_rows(self) -> int:
        """The most class rows that a step uses on one device."""
        of_device = -(-self.num_classes // self.devices)
        if self.sampled_share is None:
            return of_device
        sampled = round(of_device * self.sampled_share) + -(-self.batch_size // self.devices)
        return max(min(sampled, of_device), 1)

    @property
    def is_fetched(self) -> bool:
        """Whether class rows come from elsewhere than the device."""
        return self.stored().device == 0

    def working_bytes(self) -> tuple[int, int]:
        """Return the bytes of a device for class rows and for logits, beside what is stored.

        The class rows of a sampled step are copied. Gradients are made a block of classes at a
        time, and one block more is on its way. Logits and probabilities are kept for all classes,
        or are those of a block; the transposed probabilities are always those of a block.
        """
        used = self.used_rows
        block = min(self.chunk or CACHED_CLASSES, used)
        is_kept = self.keeps_logits and (self.chunk is None or block == used)
        copied = 0 if self.sampled_share is None else used
        rows = FLOAT_BYTES * self.embedding_size * (copied + 2 * block)
        logits = FLOAT_BYTES * self.batch_size * (2 * (used if is_kept else block) + block)
        return rows, logits

    def stored(self) -> StoreMemory:
        """Return the bytes of class weights and momenta, where they are stored."""
        return find_store(self.store, self.dtype).memory(
            self.num_classes,
            self.embedding_size,
            self.devices,
            self.processes,
            copies=2 if self.momentum else 1,
        )


def gigabytes(count: int) -> str:
    """Format bytes as gigabytes."""
    return f"{count / 1e9:.2f} GB"


def of_device(
    symbol: mx.sym.Symbol,
    image_shape: tuple[int, int, int],
    batch_size: int,
    head: HeadSize,
) -> Estimate:
    """Estimate what the busiest device will hold.

    Parameters
    ----------
    symbol : mx.sym.Symbol
        The network.
    image_shape : (3, height, width)
    batch_size : int
        Of one device.
    head : HeadSize
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
    rows, logits = head.working_bytes()
    return Estimate(
        FLOAT_BYTES * (3 * parameters + statistics),
        int(KEPT_BESIDE_OUTPUTS * FLOAT_BYTES * produced),
        head.stored().device + rows,
        logits,
    )


def of_machine(device: Estimate, contexts: int, is_class_parallel: bool, host: int) -> Estimate:
    """Estimate what a machine without GPUs will hold, whose contexts share its memory.

    Parameters
    ----------
    device : Estimate
        Of one context.
    contexts : int
    is_class_parallel : bool
        Whether each context has a part of the classes, or the first one all.
    host : int
        Bytes of class weights beside those of the contexts.
    """
    heads = contexts if is_class_parallel else 1
    return Estimate(
        network=contexts * device.network,
        activations=contexts * device.activations,
        classes=heads * device.classes + host,
        logits=contexts * device.logits,
    )


def check_fits(estimate: Estimate, free: int, where: str, is_sampled: bool) -> None:
    """Refuse a run that does not fit into the free bytes, with advice."""
    if estimate.total <= free:
        return
    advice = ["a smaller --per-batch-size, with --accumulate"]
    if estimate.logits > estimate.total / 4:
        advice.append("--chunk 16384")
    if estimate.classes + estimate.logits > estimate.total / 2:
        advice.append("more devices with --class-parallel")
        if is_sampled:
            advice.append("--store host, with --class-dtype float16 if that is not enough")
        else:
            advice.append("a loss with sampled classes (--loss dsoftmax_k)")
    raise ValueError(
        f"the run needs about {estimate} on {where}, where {gigabytes(free)} are free; try "
        f"{' or '.join(advice)}"
    )
