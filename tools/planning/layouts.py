"""A run that is only described, in the stores and at the sizes it could have."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import mxnet as mx

from dsoftmax.losses.stores import DTYPES, STORES, TYPED_STORES, find_store
from dsoftmax.recognition.common.devices import contexts
from dsoftmax.recognition.common.memory import available_bytes
from dsoftmax.recognition.common.speed import Speed, measure_speed
from dsoftmax.recognition.data.records import FLOAT32_EXACT
from dsoftmax.recognition.estimate import PROCESS_BYTES
from dsoftmax.recognition.needs import (
    Layout,
    Needs,
    NetworkSize,
    head_seconds,
    needs_of,
    network_seconds,
    network_size,
)
from dsoftmax.recognition.settings import Settings, parse

SIZES = (85_742, 757_000, 10_000_000, 100_000_000)  # MS1M, MegaFace2, and what is to come
UNREAD = ["--dataset", "faces", "--data-dir", "faces"]  # the run has data, which nobody opens here


class DescribedRun(NamedTuple):
    """A run as its flags describe it."""

    flags: list[str]  # of train.py
    settings: Settings
    layout: Layout
    network: NetworkSize

    @property
    def num_classes(self) -> int:
        """K; MS1M's if the flags do not say."""
        return self.settings.num_classes or SIZES[0]

    @property
    def is_sampled(self) -> bool:
        """Whether a step uses some of the classes only."""
        return self.settings.loss_spec().sampled_share is not None


class Limits(NamedTuple):
    """Bytes that there are; None if unknown."""

    host: int | None
    device: int | None

    @classmethod
    def of(cls, memory: float | None, device_memory: float | None, run: DescribedRun) -> Limits:
        """Take what flags say in GB; by default this machine's free memory, for a run on CPUs."""
        host = None if memory is None else int(memory * 1e9)
        if host is None and run.layout.on_cpu and run.layout.processes == 1:
            host = available_bytes()
        device = None if device_memory is None else int(device_memory * 1e9)
        return cls(host, None if run.layout.on_cpu else device)


class Calibration(NamedTuple):
    """What was measured on this machine."""

    speed: Speed
    image_seconds: float  # of the network, forward and backward


class Planned(NamedTuple):
    """What a run needs in one store at one size."""

    num_classes: int
    store: str
    dtype: str
    needs: Needs
    host: int  # bytes of each host, with those of a server if there are any
    problem: str  # why it can't be run like that; empty if it can
    seconds: float | None  # per step; None if it can't be told here


def describe_run(flags: list[str], hosts: int) -> DescribedRun:
    """Describe a run by flags of ``train.py``."""
    flags = [*flags, *(["--kvstore", "dist_sync"] if hosts > 1 else [])]
    settings = parse([*flags, *UNREAD])
    if not settings.loss_spec().has_classes:
        raise ValueError(
            f"--loss {settings.loss} has no class weights to plan for: a run needs the memory of "
            "its network, whatever the number of identities"
        )
    devices = contexts(settings.devices)
    on_cpu = devices[0].device_type == "cpu"
    return DescribedRun(
        flags, settings, Layout(len(devices), hosts, on_cpu), network_size(settings)
    )


def calibrate(run: DescribedRun) -> Calibration | None:
    """Measure this machine's CPU; nothing if the run is for GPUs."""
    if not run.layout.on_cpu:
        return None
    settings, layout = run.settings, run.layout
    batch = settings.per_batch_size * layout.devices * layout.processes
    speed = measure_speed(mx.cpu(), batch, settings.embedding_size)
    return Calibration(speed, network_seconds(settings, run.network))


def plan_run(run: DescribedRun, limits: Limits, calibration: Calibration | None) -> Planned:
    """Plan the run as it is described."""
    return _plan(run, run.num_classes, run.settings, limits, calibration)


def plan_sizes(run: DescribedRun, limits: Limits, calibration: Calibration | None) -> list[Planned]:
    """Plan the run at several numbers of identities, in every store that can serve it."""
    planned = []
    for num_classes in SIZES:
        for store in STORES:
            for dtype in DTYPES[:2]:  # bfloat16 needs what float16 does
                if dtype != "float32" and (store, dtype) not in TYPED_STORES:
                    continue
                if find_store(store, dtype).needs_sampled_classes and not run.is_sampled:
                    continue
                settings = dataclasses.replace(run.settings, store=store, class_dtype=dtype)
                planned.append(_plan(run, num_classes, settings, limits, calibration))
    return planned


def _plan(
    run: DescribedRun,
    num_classes: int,
    settings: Settings,
    limits: Limits,
    calibration: Calibration | None,
) -> Planned:
    layout = run.layout
    needs = needs_of(settings, num_classes, layout, run.network)
    host = needs.host
    if needs.servers:  # one server per host, a process of its own
        host += needs.servers // layout.processes + PROCESS_BYTES
    problem = ""
    if limits.device is not None and needs.device.total > limits.device:
        problem = "more than a device has"
    elif limits.host is not None and host > limits.host:
        problem = "more than a host has"
    elif needs.servers and layout.processes == 1:
        problem = "needs servers: --hosts 2 or more"
    seconds = None
    if calibration is not None:
        images = settings.per_batch_size * layout.devices * settings.accumulate
        seconds = images * calibration.image_seconds + head_seconds(needs, calibration.speed)
    return Planned(num_classes, settings.store, settings.class_dtype, needs, host, problem, seconds)


def advise(run: DescribedRun, planned: Planned, others: list[Planned]) -> list[str]:
    """Say what to change, or to know, before the run is started."""
    advice = []
    needs = planned.needs
    if planned.problem:
        advice.append(f"the run does not fit: {planned.problem}")
        fitting = [
            other
            for other in others
            if other.num_classes == planned.num_classes and not other.problem
        ]
        if fitting:
            stores = " or ".join(
                f"--store {one.store}"
                + (f" --class-dtype {one.dtype}" if one.dtype != "float32" else "")
                for one in fitting
            )
            advice.append(f"it would with {stores}")
    if not run.is_sampled and planned.num_classes > SIZES[0]:
        advice.append(
            "every step computes with all classes: --loss dsoftmax_k --sample-rate 1/64 computes "
            "with 1/64 of them"
        )
    if needs.device.logits > needs.device.total / 4 and run.settings.chunk is None:
        advice.append("--chunk 16384 needs less memory for logits, and a third more time")
    if needs.device.activations > needs.device.total / 2:
        advice.append("a smaller --per-batch-size with --accumulate needs less for activations")
    if planned.num_classes > FLOAT32_EXACT:
        advice.append(
            f"labels in a .rec are float32, exact up to {FLOAT32_EXACT:,}: more identities can't "
            "be read from one dataset; see tools/planning.md"
        )
    return advice


def command_of(run: DescribedRun) -> str:
    """Return the command that starts the run."""
    train = " ".join(
        [
            "python -u recognition/train.py",
            *run.flags,
            "--dataset <name> --data-dir <folder>",
        ]
    )
    hosts = run.layout.processes
    if hosts == 1:
        return train
    return f"python tools/launch.py -n {hosts} -s {hosts} --hosts hosts.txt -- {train}"
