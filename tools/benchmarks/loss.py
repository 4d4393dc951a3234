"""Measure what a training step of the loss layer costs, against the products it cannot avoid."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import statistics
import sys
import time
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from dsoftmax import losses
from dsoftmax.losses.presets import resolve
from dsoftmax.recognition.common.cli import rate
from dsoftmax.recognition.common.devices import contexts
from dsoftmax.recognition.common.distributed.group import ALONE, Group
from dsoftmax.recognition.common.memory import (
    available_bytes,
    forget_peak,
    peak_bytes,
    resident_bytes,
)
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.common.speed import copy_bandwidth
from dsoftmax.tools.benchmarks.measuring import Isolated

FLOOR_CLASSES = 1 << 16  # at a time: more are no faster
SWEEP_ROWS = 100_000  # a sweep leaves out steps with more class weights: they take too long
NETWORK_SECONDS = 0.1  # of the pause that stands for a network on a GPU: no core is busy
OPTIMIZER = {"learning_rate": 0.1, "wd": 5e-4}


@dataclasses.dataclass(frozen=True)
class Contender:
    """Settings of one head to measure, in its own process."""

    loss: str
    classes: int
    width: int
    batch_size: int
    sample_rate: float
    devices: str = "cpu"
    store: str = "device"
    dtype: str = "float32"
    momentum: float = 0.9
    chunk: int | None = None
    name: str = ""
    options: tuple[tuple[str, Any], ...] = ()  # of the loss

    @property
    def negatives(self) -> str:
        """How the loss chooses its negatives."""
        return resolve(self.loss, dict(self.options)).negatives

    @property
    def rows(self) -> int:
        """Estimate how many class weights a step uses."""
        if self.negatives == "batch":
            return self.batch_size
        if self.negatives in ("classes", "forest", "mixed"):
            return min(round(self.sample_rate * self.classes) + self.batch_size, self.classes)
        return self.classes

    @property
    def bytes_of_weights(self) -> int:
        """Size of all class weights, which is also the size of all momenta if there are any."""
        return self.bytes_of_number * self.classes * self.width

    @property
    def bytes_of_number(self) -> int:
        """Bytes of a number of the class weights."""
        return 4 if self.dtype == "float32" else 2

    @property
    def bytes_stored(self) -> int:
        """Size of all class weights and momenta."""
        return self.bytes_of_weights * (2 if self.momentum else 1)

    @property
    def bytes_needed(self) -> int:
        """Estimate the memory, to decide how many contenders run at once."""
        logits = 2 * 4 * self.batch_size * min(self.rows, self.chunk or self.rows)
        forest = self.classes * 600 if self.negatives in ("forest", "mixed") else 0
        return self.bytes_stored + logits + forest + (1 << 29)

    def make_head(self, group: Group) -> losses.Head:
        """Create the head, or this process's part of it if a group shares the classes."""
        options = dict(self.options)
        if "sample_rate" in resolve(self.loss, options).options:
            options["sample_rate"] = self.sample_rate
        return losses.create(
            self.loss,
            self.classes,
            self.width,
            ctx=contexts(self.devices),
            store=self.store,
            dtype=self.dtype,
            chunk=self.chunk,
            seed=1,
            group=group,
            **options,
        )


def parse_contender(text: str, args: argparse.Namespace) -> Contender:
    """Parse ``dsoftmax_k`` or ``dsoftmax_k:devices=cpu:2,store=host``."""
    loss, _, changes = text.partition(":")
    if loss not in losses.names():
        raise ValueError(f"--losses: there is no {loss!r}; legal are {', '.join(losses.names())}")
    parsers = {
        "devices": str,
        "store": str,
        "dtype": str,
        "momentum": float,
        "chunk": int,
        "sample_rate": rate,
        "classes": int,
    }
    changed, options = {}, {}
    for change in changes.split(",") if changes else ():
        key, _, value = change.partition("=")
        if key in parsers:
            changed[key] = parsers[key](value)
            if key == "sample_rate":  # which makes any loss a sampled one
                options[key] = changed[key]
        elif key in resolve(loss).options:
            options[key] = _literal(value)
        else:
            raise ValueError(
                f"--losses {text}: {key!r} is none of {', '.join(parsers)}, nor an option of {loss}"
            )
    common = {key: getattr(args, key) for key in ("width", "batch_size", *parsers)}
    sampled = resolve(loss, options).sampled_share is not None
    if not sampled and "store" not in changed:
        # only sampled classes can be in the host's memory, and only there in 2 bytes
        common.update(store="device", dtype="float32")
    settings = {**common, **changed}
    return Contender(loss=loss, name=text, options=tuple(options.items()), **settings)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class Bench:
    """Runs steps of one head and measures them.

    Parameters
    ----------
    contender : Contender
    group : Group
        The processes that share the classes.

    Attributes
    ----------
    wait : callable
        Returns when a step is done.
    """

    def __init__(self, contender: Contender, group: Group = ALONE):
        self.contender = contender
        self.wait = nd.waitall
        before = resident_bytes()
        self.head = contender.make_head(group)
        self.head.initialize(mx.init.Normal(0.01))
        optimizer = {**OPTIMIZER, "momentum": contender.momentum}
        self.trainer = self.head.trainer("sgd", optimizer)
        nd.waitall()
        self._base = before + contender.bytes_stored
        self._random = np.random.default_rng(1)  # the same in all processes
        embeddings = self._random.normal(size=(contender.batch_size, contender.width))
        self.embeddings = nd.array(embeddings, ctx=contexts(contender.devices)[0])
        self.embeddings.attach_grad()
        self._floor: list = []
        forget_peak()

    def step(self) -> dict[str, float]:
        """Train on a batch; return the seconds of the step, its sampler and its forest."""
        labels = self._draw_labels()
        sampling = []
        draw = self.head.sampler.draw

        def timed_draw(*arguments):
            started = time.perf_counter()
            drawn = draw(*arguments)
            sampling.append(time.perf_counter() - started)
            return drawn

        self.head.sampler.draw = timed_draw
        number = self.head.step
        nd.waitall()
        started = time.perf_counter()
        self._train(labels)
        seconds = time.perf_counter() - started
        del self.head.sampler.draw
        # A forest is rebuilt every `rebuild_every` steps: charge each step with its share.
        stats = self.head.sampler.stats
        rebuild = stats.get("forest_rebuild_seconds", 0.0)
        if stats.get("forest_built_at_step") == number:
            seconds, sampling[0] = seconds - rebuild, sampling[0] - rebuild
        rebuild /= getattr(self.head.sampler, "rebuild_every", 1)
        return {"step": seconds + rebuild, "sampler": sampling[0] + rebuild, "rebuild": rebuild}

    def step_fetching_early(self) -> float:
        """Train on a batch whose class rows are fetched before a network runs."""
        return self._step_after_network(is_early=True)

    def step_fetching_late(self) -> float:
        """Train on a batch whose class rows are fetched after a network has run."""
        return self._step_after_network(is_early=False)

    def _step_after_network(self, is_early: bool) -> float:
        """Return the seconds of a step, of which a stand-in for a network takes some."""
        labels = self._draw_labels()
        nd.waitall()
        started = time.perf_counter()
        if is_early:
            self.head.begin_update([labels])
        time.sleep(NETWORK_SECONDS)
        self._train(labels)
        return time.perf_counter() - started

    def _draw_labels(self) -> np.ndarray:
        return self._random.integers(0, self.contender.classes, self.contender.batch_size)

    def _train(self, labels: np.ndarray) -> None:
        with autograd.record():
            loss = self.head(self.embeddings, labels)
        loss.backward()
        self.trainer.step(len(labels))
        self.wait()

    def memory(self) -> dict[str, int]:
        """Return the highest number of bytes in use, in all and beyond weights and momenta."""
        peak = peak_bytes()
        return {"peak": peak, "above": peak - self._base}

    def floor(self) -> dict[str, float]:
        """Return the seconds of the three matrix products alone, by each way MXNet has."""
        if not self._floor:
            self._floor = [self._products(shard) for shard in self.head.store.shards]
        ways = {"dot": _multiply_by_dot}
        if self.head.store.shards[0].device.device_type == "cpu":
            ways["FullyConnected"] = _multiply_by_layer
        seconds = {}
        for name, multiply in ways.items():
            nd.waitall()
            started = time.perf_counter()
            for products in self._floor:
                for operands in products:
                    multiply(*operands)
                if name == "dot":  # contexts of a CPU that multiply by it at once may hang
                    nd.waitall()
            nd.waitall()
            seconds[name] = time.perf_counter() - started
        return seconds

    def _products(self, shard) -> list[tuple[nd.NDArray, ...]]:
        """Return the operands of a device's products, in slices of classes."""
        stats, device, width = self.head.stats, shard.device, self.contender.width
        batch = self.contender.batch_size
        if self.contender.negatives == "rows":
            batch = max(1, round(self.contender.sample_rate * batch))
        rows = round(stats["rows_touched"] * len(shard) / self.head.store.shape[0])
        most = min(rows, FLOOR_CLASSES)
        embeddings = nd.random.normal(shape=(batch, width), ctx=device)
        embeddings.attach_grad()
        operands = {}
        for count in {min(most, rows - at) for at in range(0, rows, most)}:
            weight = nd.random.normal(shape=(count, width), ctx=device)
            weight.attach_grad()
            operands[count] = embeddings, weight, nd.zeros((batch, count), ctx=device)
        return [operands[min(most, rows - at)] for at in range(0, rows, most)]

    def copy_bandwidth(self) -> float:
        """Return the bytes per second that a plain copy of a large array reads and writes."""
        return copy_bandwidth(self.head.store.shards[0].device)

    def rows(self) -> int:
        """Return how many class weights the last step read and wrote."""
        return int(self.head.stats["rows_touched"])


def groups_that_fit(contenders: list[Contender]) -> list[list[Contender]]:
    """Split contenders into groups whose members fit into memory together."""
    groups: list[list[Contender]] = []
    room = 0
    for contender in contenders:
        if contender.bytes_needed > available_bytes():
            raise ValueError(
                f"{contender.name} with {contender.classes:,} classes needs about "
                f"{contender.bytes_needed / 1e9:.1f} GB, and {available_bytes() / 1e9:.1f} GB are "
                "free: choose fewer --classes"
            )
        if contender.bytes_needed > room:
            groups.append([])
            room = available_bytes()
        groups[-1].append(contender)
        room -= contender.bytes_needed
    return groups


def _multiply_by_dot(embeddings: nd.NDArray, weight: nd.NDArray, logits: nd.NDArray) -> None:
    nd.dot(embeddings, weight, transpose_b=True, out=logits)
    nd.dot(logits, weight, out=embeddings.grad)
    nd.dot(logits, embeddings, transpose_a=True, out=weight.grad)


def _multiply_by_layer(embeddings: nd.NDArray, weight: nd.NDArray, logits: nd.NDArray) -> None:
    with autograd.record():
        output = nd.FullyConnected(
            embeddings, weight, no_bias=True, num_hidden=len(weight), out=logits[:]
        )
    output.backward(logits)


def measure(contenders: list[Contender], warm_ups: int, steps: int) -> list[dict[str, Any]]:
    """Measure contenders in turns, as many at once as fit into memory.

    Parameters
    ----------
    contenders : list of Contender
    warm_ups, steps : int
        Numbers of steps that do not count, and that do.

    Returns
    -------
    list of dict
        One per contender: its fields; ``seconds`` (median), ``low`` and ``high`` of a step, and
        ``step_seconds``, those of all that count, in the order in which contenders took turns;
        ``floor``, the seconds of its products by the fastest of the ways in ``floors``; ``ratio``,
        of step to floor; the seconds of ``sampler`` and ``rebuild``;
        ``peak_bytes``, ``working_bytes`` (beyond weights and momenta), ``rows``, ``bytes_read`` and
        ``bytes_written`` of weights and momenta; ``copy_bandwidth``, bytes per second of a copy.
    """
    results = []
    for group in groups_that_fit(contenders):
        processes: list[Isolated] = []
        turns = len(group) * (1 + warm_ups + steps)
        names = ", ".join(contender.name for contender in group)
        try:
            with progress(total=turns, desc=f"{group[0].classes:,} classes", unit="steps") as bar:
                for contender in group:
                    processes.append(Isolated(Bench, contender))
                    bar.update(1)
                for _ in range(warm_ups):
                    for process in processes:
                        process.call("step")
                        bar.update(1)
                memories = [process.call("memory") for process in processes]
                bandwidths = [process.call("copy_bandwidth") for process in processes]
                taken: list[list[dict[str, float]]] = [[] for _ in processes]
                floors: list[list[dict[str, float]]] = [[] for _ in processes]
                for process in processes:
                    process.call("floor")
                for _ in range(steps):
                    for number, process in enumerate(processes):
                        taken[number].append(process.call("step"))
                        floors[number].append(process.call("floor"))
                        bar.update(1)
            for number, contender in enumerate(group):
                summary = summarize(taken[number], floors[number], memories[number])
                moved = weights_moved(processes[number].call("rows"), contender)
                moved["copy_bandwidth"] = bandwidths[number]
                results.append(
                    {**dataclasses.asdict(contender), **summary, **moved, "together_with": names}
                )
        finally:
            for process in processes:
                process.stop()
    return results


def summarize(
    taken: list[dict[str, float]], floors: list[dict[str, float]], memory: dict[str, int]
) -> dict[str, Any]:
    """Return the medians of all measurements of one contender."""
    steps = [times["step"] for times in taken]
    ways = {way: statistics.median(floor[way] for floor in floors) for way in floors[0]}
    fastest = min(ways, key=ways.get)
    return {
        "seconds": statistics.median(steps),
        "step_seconds": steps,
        "low": min(steps),
        "high": max(steps),
        "floor": ways[fastest],
        "floors": ways,
        # Step and floor were measured one after the other, under the same load of the machine.
        "ratio": statistics.median(step / floor[fastest] for step, floor in zip(steps, floors)),
        "sampler": statistics.median(times["sampler"] for times in taken),
        "rebuild": statistics.median(times["rebuild"] for times in taken),
        "peak_bytes": memory["peak"],
        "working_bytes": memory["above"],
    }


def weights_moved(rows: int, contender: Contender) -> dict[str, int]:
    """Return the bytes of weights and momenta that a step reads and writes."""
    moved = rows * contender.bytes_stored // contender.classes
    return {"rows": rows, "bytes_read": moved, "bytes_written": moved}


def sweep(
    contenders: list[Contender], numbers: list[int], sampled: int, warm_ups: int, steps: int
) -> list[dict[str, Any]]:
    """Measure at growing numbers of classes, with a fixed number of sampled ones.

    Parameters
    ----------
    contenders : list of Contender
    numbers : list of int
        Numbers of classes. Contenders whose steps would take too long or too much memory are left
        out, with a line on stderr.
    sampled : int
        The number of sampled classes.
    warm_ups, steps : int
        See `measure`.

    Returns
    -------
    list of dict
        See `measure`.
    """
    results = []
    for classes in numbers:
        scaled = [
            dataclasses.replace(contender, classes=classes, sample_rate=sampled / classes)
            for contender in contenders
        ]
        fitting = [
            contender
            for contender in scaled
            if contender.rows <= SWEEP_ROWS and contender.bytes_needed <= available_bytes()
        ]
        for left_out in scaled:
            if left_out not in fitting:
                print(f"sweep: {left_out.name} left out at {classes:,} classes", file=sys.stderr)
        results += measure(fitting, warm_ups, steps)
    return results
