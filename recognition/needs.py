"""What a run needs, by its settings alone: memory, bytes per step and time per step."""

from __future__ import annotations

import time
from typing import NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd

from dsoftmax.losses.stores.base import FLOAT_BYTES
from dsoftmax.recognition import estimate, networks, traffic
from dsoftmax.recognition.common.speed import Speed
from dsoftmax.recognition.estimate import Estimate, HeadSize
from dsoftmax.recognition.networks import to_symbol
from dsoftmax.recognition.networks.flops import count_flops
from dsoftmax.recognition.settings import Settings
from dsoftmax.recognition.traffic import Traffic

MANY_CLASSES = 10_000  # from so many on, several devices share the class weights by default
USUAL_SIZE = (112, 112)
# Passes over the class rows of a step beside its products: of all classes, whose weights and
# momenta are read and written; of sampled ones, whose rows are copied first and lie scattered.
PASSES_OF_ALL, PASSES_OF_SAMPLED = 4, 9
TIMED_IMAGES = 4


class Layout(NamedTuple):
    """The devices of a run."""

    devices: int  # of one process
    processes: int = 1
    on_cpu: bool = True  # whether the devices share the host's memory


class Needs(NamedTuple):
    """What a run needs."""

    head: HeadSize
    device: Estimate  # of one device
    host: int  # bytes of the memory of each host, with those of devices that are CPUs
    servers: int  # bytes of all parameter servers together
    traffic: Traffic
    flops: int  # of the network per image, forward
    parameters: int  # of the network


def splits_classes(settings: Settings, devices: int, num_classes: int) -> bool:
    """Say whether the class weights are split over the devices of a process."""
    if settings.class_parallel is None:
        return devices > 1 and num_classes >= MANY_CLASSES
    return settings.class_parallel


def head_size(settings: Settings, num_classes: int, layout: Layout) -> HeadSize:
    """Describe the head of a run."""
    sharing = layout.devices if splits_classes(settings, layout.devices, num_classes) else 1
    images = settings.per_batch_size * layout.devices * layout.processes
    loss = settings.loss_spec()
    return HeadSize(
        num_classes * loss.options.get("subcentres", 1),
        settings.embedding_size,
        images * settings.accumulate,
        devices=layout.processes * sharing,
        processes=layout.processes,
        store=settings.store,
        dtype=settings.class_dtype,
        chunk=settings.chunk,
        sampled_share=loss.sampled_share,
        momentum=settings.mom,
        keeps_logits=settings.accumulate == 1,
    )


class NetworkSize(NamedTuple):
    """What the needs of a run depend on, of its network."""

    symbol: mx.sym.Symbol
    image_shape: tuple[int, int, int]
    parameters: int
    flops: int


def network_size(settings: Settings) -> NetworkSize:
    """Describe the network of a run, without making its parameters."""
    size = settings.image_size or USUAL_SIZE
    network = networks.create(
        settings.architecture,
        settings.embedding_size,
        image_size=size,
        **settings.network_options,
    )
    symbol, shape = to_symbol(network), (3, *size)
    shapes, _, _ = symbol.infer_shape(data=(1, *shape))
    named = zip(symbol.list_arguments(), shapes)
    parameters = sum(int(np.prod(one)) for name, one in named if name != "data")
    return NetworkSize(symbol, shape, parameters, count_flops(symbol, shape))


def needs_of(settings: Settings, num_classes: int, layout: Layout, network: NetworkSize) -> Needs:
    """Estimate what a run needs.

    Parameters
    ----------
    settings : Settings
    num_classes : int
        K.
    layout : Layout
    network : NetworkSize
    """
    head = head_size(settings, num_classes, layout)
    stored = head.stored()
    device = estimate.of_device(network.symbol, network.image_shape, settings.per_batch_size, head)
    host = stored.host + estimate.PROCESS_BYTES
    if layout.on_cpu:
        is_split = splits_classes(settings, layout.devices, num_classes)
        host += estimate.of_machine(device, layout.devices, is_split, 0).total
    moved = traffic.of_process(head, network.parameters)
    return Needs(head, device, host, stored.servers, moved, network.flops, network.parameters)


def head_seconds(needs: Needs, speed: Speed) -> float:
    """Estimate the time of a step's loss layer and update, in one process on CPUs.

    Its three matrix products, and the passes over its class rows. Devices of one CPU share it.
    """
    head, moved = needs.head, needs.traffic
    operations = 6 * head.batch_size * head.embedding_size * moved.rows
    passes = PASSES_OF_ALL if head.sampled_share is None else PASSES_OF_SAMPLED
    passed = passes * FLOAT_BYTES * head.embedding_size * moved.rows
    return operations / speed.products + passed / speed.copies


def network_seconds(settings: Settings, network: NetworkSize) -> float:
    """Measure the network, forward and backward, on this machine's CPU: seconds per image."""
    made = networks.create(
        settings.architecture,
        settings.embedding_size,
        image_size=network.image_shape[1:],
        **settings.network_options,
    )
    made.initialize(networks.initializer(settings.architecture), ctx=mx.cpu())
    images = mx.nd.zeros((TIMED_IMAGES, *network.image_shape), dtype="uint8")
    made(images[:1]).wait_to_read()  # the first pass makes all shapes known
    made.hybridize_for("cpu")
    taken = []
    for _ in range(3):  # the first one also makes the graph
        started = time.perf_counter()
        with autograd.record():
            output = made(images)
        output.backward()
        mx.nd.waitall()
        taken.append(time.perf_counter() - started)
    return min(taken) / TIMED_IMAGES
