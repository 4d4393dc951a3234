"""Measure what a training step of the loss layer costs, against the products it cannot avoid.

    python tools/bench_loss.py                     the paper's Table 3, half an hour
    python tools/bench_loss.py --quick             the same in small, a minute
    python tools/bench_loss.py --losses dsoftmax_k dsoftmax_k:devices=cpu:2 dsoftmax:chunk=16384
    python tools/bench_loss.py --distributed       on parameter servers, three minutes

A step is all of it: sampling, gathering, forward, backward and update. The *floor* is the time of
its three matrix products alone (logits, gradient to the embeddings, gradient to the weights), by
MXNet and in the same shapes. Every contender runs in a process of its own, and they take turns,
step by step, so that what else the machine does befalls all alike. The first steps do not count.

--distributed starts a job of two workers and two servers on this machine. It takes turns with one
process that has all class weights, in its host's memory and in its device's. What is printed: the
time of a step and of its parts, what each worker sends and gets, and what the servers hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from fractions import Fraction
from typing import Any

import numpy as np

from dsoftmax.eval import plots
from dsoftmax.recognition.common.cli import add_json_flag, command, print_json, rate
from dsoftmax.recognition.common.memory import (
    available_bytes,
    forget_peak,
    peak_bytes,
    resident_bytes,
)
from dsoftmax.recognition.common.preflight import check_mxnet
from dsoftmax.recognition.common.progress import progress
from dsoftmax.tools.benchmarks.measuring import Apart, describe_machine

check_mxnet()

from dsoftmax.recognition.common.distributed import job  # noqa: E402
from dsoftmax.recognition.common.distributed.role import is_worker  # noqa: E402
from dsoftmax.tools import bench_distributed  # noqa: E402

if __name__ == "__main__" and bench_distributed.is_in_job() and not is_worker():
    bench_distributed.serve()  # without all that only workers need
    sys.exit()

import mxnet as mx  # noqa: E402
from mxnet import autograd, nd  # noqa: E402

from dsoftmax import losses  # noqa: E402
from dsoftmax.losses import operators  # noqa: E402
from dsoftmax.losses.presets import PRESETS, resolve  # noqa: E402
from dsoftmax.recognition.common.devices import contexts  # noqa: E402
from dsoftmax.recognition.common.distributed.group import ALONE, Group  # noqa: E402

# Seconds a step of the paper's Table 3: the loss layer, and the whole model.
PAPER = {
    "nsoftmax": (3.12, 3.96),
    "rand_softmax": (0.20, 1.04),
    "hf_softmax": (2.04, 2.88),
    "dsoftmax_k": (0.21, 1.05),
}
PAPER_FOREST_SECONDS = 1.83
FLOOR_CLASSES = 1 << 16  # at a time: more are no faster
SWEEP = (10_000, 30_000, 100_000, 300_000, 1_000_000, 2_000_000, 4_000_000)
SWEEP_ROWS = 100_000  # a step of more takes too long to be swept
QUICK = {
    "classes": 20_000,
    "sample_rate": 1 / 16,
    "warm_ups": 10,
    "steps": 10,
    "plot_classes": [2_000, 6_000, 20_000, 60_000],
}
OPTIMIZER = {"learning_rate": 0.1, "momentum": 0.9, "wd": 5e-4}
MEGABYTE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Contender:
    """What one process measures."""

    loss: str
    classes: int
    width: int
    batch_size: int
    sample_rate: float
    devices: str = "cpu"
    store: str = "device"
    chunk: int | None = None
    name: str = ""

    @property
    def negatives(self) -> str:
        """How the loss chooses them."""
        return PRESETS[self.loss].negatives

    @property
    def rows(self) -> int:
        """Return how many class weights a step uses, about."""
        if self.negatives in ("classes", "forest"):
            return min(round(self.sample_rate * self.classes) + self.batch_size, self.classes)
        return self.classes

    @property
    def bytes_of_weights(self) -> int:
        """Of all weights, or as many of momenta."""
        return 4 * self.classes * self.width

    @property
    def bytes_needed(self) -> int:
        """Estimate the memory, to see how many contenders fit in at once."""
        logits = 2 * 4 * self.batch_size * min(self.rows, self.chunk or self.rows)
        forest = self.classes * 600 if self.negatives == "forest" else 0
        return 2 * self.bytes_of_weights + logits + forest + (1 << 29)

    def make_head(self, group: Group) -> losses.Head:
        """Create the head, of which each process of a group has its share."""
        options = {}
        if "sample_rate" in resolve(self.loss).options:
            options["sample_rate"] = self.sample_rate
        return losses.create(
            self.loss,
            self.classes,
            self.width,
            ctx=contexts(self.devices),
            store=self.store,
            chunk=self.chunk,
            seed=1,
            group=group,
            **options,
        )


class Bench:
    """A head, and what is measured of it.

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
        self.trainer = self.head.trainer("sgd", OPTIMIZER)
        nd.waitall()
        self._base = before + 2 * contender.bytes_of_weights
        self._random = np.random.default_rng(1)  # the same in all processes
        embeddings = self._random.normal(size=(contender.batch_size, contender.width))
        self.embeddings = nd.array(embeddings, ctx=contexts(contender.devices)[0])
        self.embeddings.attach_grad()
        self._floor: list = []
        forget_peak()

    def step(self) -> dict[str, float]:
        """Train on a batch; return the seconds of the step, its sampler and its forest."""
        size = self.contender.batch_size
        labels = self._random.integers(0, self.contender.classes, size)
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
        with autograd.record():
            loss = self.head(self.embeddings, labels)
        loss.backward()
        self.trainer.step(size)
        self.wait()
        seconds = time.perf_counter() - started
        del self.head.sampler.draw
        # A forest is rebuilt every so many steps, whose share each of them is charged with.
        stats = self.head.sampler.stats
        rebuild = stats.get("forest_rebuild_seconds", 0.0)
        if stats.get("forest_built_at_step") == number:
            seconds, sampling[0] = seconds - rebuild, sampling[0] - rebuild
        rebuild /= getattr(self.head.sampler, "rebuild_every", 1)
        return {"step": seconds + rebuild, "sampler": sampling[0] + rebuild, "rebuild": rebuild}

    def memory(self) -> dict[str, int]:
        """Return the bytes in use at most, in all and above weights and momenta."""
        peak = peak_bytes()
        return {"peak": peak, "above": peak - self._base}

    def floor(self) -> float:
        """Return the seconds of the three matrix products alone."""
        if not self._floor:
            self._floor = [self._products(shard) for shard in self.head.store.shards]
        nd.waitall()
        started = time.perf_counter()
        for products in self._floor:
            for embeddings, weight, logits, gradient, to_embeddings in products:
                nd.dot(embeddings, weight, transpose_b=True, out=logits)
                nd.dot(logits, weight, out=to_embeddings)
                nd.dot(logits, embeddings, transpose_a=True, out=gradient)
            if self.head.store.one_at_a_time:
                nd.waitall()
        nd.waitall()
        return time.perf_counter() - started

    def _products(self, shard) -> list[tuple[nd.NDArray, ...]]:
        """Return the operands of a device's products, a slice of classes at a time."""
        stats, device, width = self.head.stats, shard.device, self.contender.width
        batch = self.contender.batch_size
        if self.contender.negatives == "rows":
            batch = max(1, round(self.contender.sample_rate * batch))
        rows = round(stats["rows_touched"] * len(shard) / self.contender.classes)
        most = min(rows, FLOOR_CLASSES)
        embeddings = nd.random.normal(shape=(batch, width), ctx=device)
        weight = nd.random.normal(shape=(most, width), ctx=device)
        gradient, to_embeddings = nd.zeros_like(weight), nd.zeros_like(embeddings)
        memory = nd.zeros((batch * most,), ctx=device)
        return [
            (
                embeddings,
                weight[:count],
                memory[: batch * count].reshape((batch, count)),
                gradient[:count],
                to_embeddings,
            )
            for count in (min(most, rows - at) for at in range(0, rows, most))
        ]

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


def measure(contenders: list[Contender], warm_ups: int, steps: int) -> list[dict[str, Any]]:
    """Let contenders that fit into memory together take turns.

    Returns
    -------
    list of dict
        One a contender: its own fields; ``seconds`` (median), ``low``, ``high`` and ``floor``
        (median) of a step; ``ratio`` of the two; ``sampler``, ``rebuild`` seconds of it;
        ``peak_bytes``, ``working_bytes`` (above weights and momenta), ``rows``, and
        ``bytes_read`` and ``bytes_written`` of weights and momenta.
    """
    results = []
    for group in groups_that_fit(contenders):
        processes: list[Apart] = []
        turns = len(group) * (1 + warm_ups + steps)
        names = ", ".join(contender.name for contender in group)
        try:
            with progress(total=turns, desc=f"{group[0].classes:,} classes", unit="steps") as bar:
                for contender in group:
                    processes.append(Apart(Bench, contender))
                    bar.update(1)
                for _ in range(warm_ups):
                    for process in processes:
                        process.ask("step")
                        bar.update(1)
                memories = [process.ask("memory") for process in processes]
                taken: list[list[dict[str, float]]] = [[] for _ in processes]
                floors: list[list[float]] = [[] for _ in processes]
                for process in processes:
                    process.ask("floor")
                for _ in range(steps):
                    for number, process in enumerate(processes):
                        taken[number].append(process.ask("step"))
                        floors[number].append(process.ask("floor"))
                        bar.update(1)
            for number, contender in enumerate(group):
                found = summarize(taken[number], floors[number], memories[number])
                moved = weights_moved(processes[number].ask("rows"), contender.width)
                results.append(
                    {**dataclasses.asdict(contender), **found, **moved, "together_with": names}
                )
        finally:
            for process in processes:
                process.stop()
    return results


def summarize(
    taken: list[dict[str, float]], floors: list[float], memory: dict[str, int]
) -> dict[str, Any]:
    """Return the medians of what was measured."""
    steps = [times["step"] for times in taken]
    middle, floor = statistics.median(steps), statistics.median(floors)
    return {
        "seconds": middle,
        "low": min(steps),
        "high": max(steps),
        "floor": floor,
        # Of neighbours in time, so that both have seen the same machine.
        "ratio": statistics.median(step / floor for step, floor in zip(steps, floors)),
        "sampler": statistics.median(times["sampler"] for times in taken),
        "rebuild": statistics.median(times["rebuild"] for times in taken),
        "peak_bytes": memory["peak"],
        "working_bytes": memory["above"],
    }


def weights_moved(rows: int, width: int) -> dict[str, int]:
    """Return what a step moves of the weights and their momenta."""
    moved = 2 * 4 * rows * width
    return {"rows": rows, "bytes_read": moved, "bytes_written": moved}


def paper_table(results: list[dict[str, Any]]) -> str:
    """Lay the times out as the paper's Table 3 does, its figures beside."""
    full = next((r for r in results if PRESETS[r["loss"]].negatives == "all"), None)
    head = f"{'Loss':24}{'Loss Avg. Time (s)':>20}{'x full':>9}"
    lines = [
        f"{'':24}{'here':>20}{'':9}  |{'the paper':>12}",
        f"{head}  |{'Loss (s)':>12}{'x full':>9}{'Total (s)':>11}",
    ]
    for result in results:
        seconds = result["seconds"]
        speedup = f"{full['seconds'] / seconds:.1f}" if full else ""
        line = f"{result['name']:24}{seconds:20.3f}{speedup:>9}  |"
        if result["loss"] in PAPER:
            loss, total = PAPER[result["loss"]]
            line += f"{loss:12.2f}{PAPER['nsoftmax'][0] / loss:9.1f}{total:11.2f}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def cost_table(results: list[dict[str, Any]]) -> str:
    """Lay out where the time and the memory go."""
    columns = (
        *("ms", "low-high", "floor", "x floor", "sampler", "forest"),
        *("peak MB", "above MB", "read MB", "written MB"),
    )
    widths = (9, 15, 9, 9, 9, 9, 9, 10, 9, 12)
    lines = [f"{'':24}" + "".join(f"{title:>{w}}" for title, w in zip(columns, widths))]
    for result in results:
        share = result["sampler"] / result["seconds"]
        is_forest = PRESETS[result["loss"]].negatives == "forest"
        cells = (
            f"{result['seconds'] * 1e3:.1f}",
            f"{result['low'] * 1e3:.0f}-{result['high'] * 1e3:.0f}",
            f"{result['floor'] * 1e3:.1f}",
            f"{result['ratio']:.2f}",
            "" if is_forest else f"{share:.1%}",
            f"{share:.1%}" if is_forest else "",
            f"{result['peak_bytes'] / MEGABYTE:.0f}",
            f"{result['working_bytes'] / MEGABYTE:.0f}",
            f"{result['bytes_read'] / MEGABYTE:.0f}",
            f"{result['bytes_written'] / MEGABYTE:.0f}",
        )
        lines.append(
            f"{result['name']:24}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths))
        )
    return "\n".join(lines)


def remarks(results: list[dict[str, Any]]) -> list[str]:
    """Say what the columns mean, where that is not plain."""
    lines = [
        "floor: the three matrix products alone; sampler, forest: their share of the step;",
        "above: the peak above weights and momenta; read, written: weights and momenta.",
    ]
    for result in results:
        if PRESETS[result["loss"]].negatives == "forest":
            own = result["sampler"] / result["seconds"]
            paper = PAPER_FOREST_SECONDS / PAPER["hf_softmax"][0]
            lines.append(
                f"{result['name']}: the forest is {own:.0%} of a step, {result['rebuild']:.3f} s "
                f"of it for rebuilding it now and then; the paper's was {paper:.0%}."
            )
    groups = {result["together_with"] for result in results}
    if len(groups) > 1:
        lines.append(
            "Memory was too small for all at once; together ran " + "; ".join(groups) + "."
        )
    return lines


def sweep(args: argparse.Namespace, contenders: list[Contender]) -> list[dict[str, Any]]:
    """Measure at growing numbers of classes, the number of sampled ones being fixed."""
    sampled = min(round(args.sample_rate * args.classes), round(0.8 * args.plot_classes[0]))
    results = []
    for classes in args.plot_classes:
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
        results += measure(fitting, args.warm_ups, args.steps)
    return results


def draw(results: list[dict[str, Any]], path: str) -> None:
    """Plot the time of a step against the number of classes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    markers = "osD^vP*X"
    names = list(dict.fromkeys(result["name"] for result in results))
    for number, name in enumerate(names):
        own = [result for result in results if result["name"] == name]
        classes = [result["classes"] for result in own]
        seconds = [result["seconds"] for result in own]
        low = [result["seconds"] - result["low"] for result in own]
        high = [result["high"] - result["seconds"] for result in own]
        line = axes.errorbar(
            classes, seconds, (low, high), marker=markers[number % 8], capsize=3, label=name
        )
        axes.plot(
            classes,
            [result["floor"] for result in own],
            linestyle=":",
            color=line.lines[0].get_color(),
        )
    axes.plot([], [], ":", color="grey", label="its matrix products alone")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="classes",
        ylabel="seconds a step",
        title=f"Batches of {results[0]['batch_size']}, width {results[0]['width']}, "
        f"{round(results[0]['sample_rate'] * results[0]['classes']):,} sampled classes",
    )
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}K")
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.grid(which="both", alpha=0.25)
    axes.legend()
    plots.save(figure, path)


def plot_file(text: str) -> str:
    """Check the name of a picture."""
    if text.rsplit(".", 1)[-1].lower() not in plots.FORMATS:
        raise argparse.ArgumentTypeError(f"it must end in .png, .pdf or .svg, not {text!r}")
    return text


def parse_contender(text: str, args: argparse.Namespace) -> Contender:
    """Parse ``dsoftmax_k`` or ``dsoftmax_k:devices=cpu:2,store=host``."""
    loss, _, changes = text.partition(":")
    if loss not in losses.names():
        raise ValueError(f"--losses: there is no {loss!r}; legal are {', '.join(losses.names())}")
    parsers = {"devices": str, "store": str, "chunk": int, "sample_rate": rate, "classes": int}
    own = {}
    for change in changes.split(",") if changes else ():
        key, _, value = change.partition("=")
        if key not in parsers:
            raise ValueError(f"--losses {text}: {key!r} is none of {', '.join(parsers)}")
        own[key] = parsers[key](value)
    common = {
        key: getattr(args, key)
        for key in ("classes", "width", "batch_size", "sample_rate", "devices", "store", "chunk")
    }
    sampled = PRESETS[loss].negatives in ("classes", "forest")
    if not sampled and "store" not in own:
        common["store"] = "device"  # only sampled classes can be in the host's memory
    return Contender(loss=loss, name=text, **{**common, **own})


def parse_distributed(args: argparse.Namespace) -> Contender:
    """Parse the one loss that --distributed measures; refuse what does not go with it."""
    if args.plot:
        raise ValueError("--plot is not for --distributed, which measures one number of classes")
    if len(args.losses) > 1:
        raise ValueError(f"--distributed measures one loss at a time, not {len(args.losses)}")
    contender = parse_contender(args.losses[0], args)
    if contender.negatives != "classes":
        raise ValueError(
            "--distributed measures losses of sampled classes, as dsoftmax_k and rand_softmax, not "
            f"{contender.loss}"
        )
    if contender.store != "device":
        raise ValueError("--distributed compares the stores: leave --store out")
    return contender


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="bench_loss", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--losses",
        nargs="+",
        default=["nsoftmax", "rand_softmax", "hf_softmax", "dsoftmax_k", "dsoftmax"],
        metavar="LOSS",
        help="presets, each with what is its own: LOSS:devices=cpu:2,store=host,chunk=8192,"
        "sample_rate=1/8,classes=1000; by default %(default)s",
    )
    parser.add_argument("--classes", type=int, default=757_000, help="K; %(default)s")
    parser.add_argument("--width", type=int, default=512, help="D; %(default)s")
    parser.add_argument("--batch-size", type=int, default=256, help="B; %(default)s")
    parser.add_argument("--sample-rate", type=rate, default=1 / 64, help="1/64")
    parser.add_argument("--devices", default="cpu", help="as cpu, cpu:2, gpu:4; %(default)s")
    parser.add_argument("--store", choices=("device", "host"), default="device", help="%(default)s")
    parser.add_argument("--chunk", type=int, help="classes at a time; by default all")
    parser.add_argument("--warm-ups", type=int, default=20, help="not counted; %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="counted; %(default)s")
    parser.add_argument(
        "--plot", type=plot_file, metavar="FILE", help="draw the time against the number of classes"
    )
    parser.add_argument(
        "--plot-classes",
        type=lambda text: sorted(int(part) for part in text.split(",")),
        default=list(SWEEP),
        metavar="K,K,...",
        help="for the plot; 10,000 to 4,000,000 by default",
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="two workers and two parameter servers against one process; dsoftmax_k by default",
    )
    parser.add_argument("--quick", action="store_true", help="small numbers, in a minute")
    add_json_flag(parser)
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**QUICK)
    if args.distributed:
        parser.set_defaults(losses=["dsoftmax_k"])
    args = parser.parse_args(argv)
    if args.distributed:
        contenders = [parse_distributed(args)]
    else:
        contenders = [parse_contender(text, args) for text in args.losses]
    if "DMLC_ROLE" in os.environ:
        if not bench_distributed.is_in_job():
            raise ValueError("--distributed starts its job by itself: call it without launch.py")
        own = dataclasses.replace(contenders[0], store="server")
        bench_distributed.work(lambda group: Bench(own, group))
        return
    machine = {
        **describe_machine(),
        "mxnet": mx.__version__,
        "our_operators": operators.load(),
    }
    if not args.json:
        print(
            "{processor}, {cores} cores, {memory_gb} GB, MXNet {mxnet}, ".format(**machine)
            + ("with" if machine["our_operators"] else "without")
            + " the operators of tools/build_operators.py"
        )
    report: dict[str, Any] = {"machine": machine}
    if args.distributed:
        report["distributed"] = bench_distributed.measure(
            contenders[0], Bench, argv, args.warm_ups, args.steps
        )
        tables = bench_distributed.tables(report["distributed"])
    else:
        report["results"] = results = measure(contenders, args.warm_ups, args.steps)
        tables = "\n\n".join(
            (paper_table(results), cost_table(results), "\n".join(remarks(results)))
        )
    if args.plot:
        report["sweep"] = sweep(args, contenders)
        draw(report["sweep"], args.plot)
    if args.json:
        print_json(report, args.json)
        return
    print(
        f"K = {args.classes:,}, D = {args.width}, B = {args.batch_size}, "
        f"rate {Fraction(args.sample_rate).limit_denominator(10_000)}; medians of {args.steps} "
        f"steps\n\n{tables}"
    )


if __name__ == "__main__":
    job.leave(main())
