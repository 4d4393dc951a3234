"""Measure what a training step of the loss layer costs, against the products it cannot avoid.

    python tools/bench_loss.py                     the paper's Table 3, half an hour
    python tools/bench_loss.py --quick             the same in small, a minute
    python tools/bench_loss.py --losses dsoftmax_k dsoftmax_k:devices=cpu:2 dsoftmax:chunk=16384
    python tools/bench_loss.py --distributed       on parameter servers, three minutes

A step is all of it: sampling, gathering, forward, backward and update. The *floor* is the time of
its three matrix products alone (logits, gradient to the embeddings, gradient to the weights), by
MXNet and in the same shapes. Every contender runs in its own process, and they take turns, step by
step, so that other load on the machine affects all of them alike. The first steps do not count.

--distributed starts a job of two workers and two servers on this machine. It takes turns with one
process that has all class weights, in the host's memory or the device's. It prints the time of a
step and of its parts, what it hides to fetch class rows while a network runs, the bytes each worker
sends and receives, and the memory of the servers.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import dataclasses
import os
import sys
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dsoftmax.eval import plots
from dsoftmax.losses.stores import DTYPES
from dsoftmax.recognition.common.cli import add_json_flag, command, make_parser, print_json, rate
from dsoftmax.recognition.common.distributed.role import is_worker
from dsoftmax.tools.benchmarks import job_process
from dsoftmax.tools.benchmarks.measuring import describe_machine

if TYPE_CHECKING:
    from dsoftmax.tools.benchmarks.loss import Contender

LOSSES = ["nsoftmax", "rand_softmax", "hf_softmax", "dsoftmax_k", "dsoftmax"]
SWEEP = (10_000, 30_000, 100_000, 300_000, 1_000_000, 2_000_000, 4_000_000)
QUICK = {
    "classes": 20_000,
    "sample_rate": 1 / 16,
    "warm_ups": 10,
    "steps": 10,
    "plot_classes": [2_000, 6_000, 20_000, 60_000],
}


def plot_file(text: str) -> str:
    """Check the name of a figure."""
    if text.rsplit(".", 1)[-1].lower() not in plots.FORMATS:
        raise argparse.ArgumentTypeError(f"it must end in .png, .pdf or .svg, not {text!r}")
    return text


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("bench_loss", __doc__)
    parser.add_argument(
        "--losses",
        nargs="+",
        default=LOSSES,
        metavar="LOSS",
        help="presets, each with settings that differ from the other flags: LOSS:devices=cpu:2,"
        "store=host,dtype=float16,chunk=8192,sample_rate=1/8,classes=1000, or with options of the "
        "loss: arcface:inter_filter=0.4",
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="compare two workers and two parameter servers with one process; of dsoftmax_k, "
        "unless --losses names another",
    )
    parser.add_argument("--quick", action="store_true", help="small numbers, in a minute")
    add_json_flag(parser)
    head = parser.add_argument_group("head")
    head.add_argument("--classes", type=int, default=757_000, help="K")
    head.add_argument("--width", type=int, default=512, help="D")
    head.add_argument("--batch-size", type=int, default=256, help="B")
    head.add_argument("--sample-rate", type=rate, default="1/64", help="share of sampled classes")
    head.add_argument("--devices", default="cpu", help="as cpu, cpu:2, gpu:4")
    head.add_argument(
        "--store", choices=("device", "host"), default="device", help="where class weights are"
    )
    head.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="what class weights are kept as"
    )
    head.add_argument("--momentum", type=float, default=0.9, help="0 for none, and no memory of it")
    head.add_argument("--chunk", type=int, help="classes at a time; by default all")
    steps = parser.add_argument_group("steps")
    steps.add_argument("--warm-ups", type=int, default=20, help="steps that do not count")
    steps.add_argument("--steps", type=int, default=20, help="steps that count")
    plot = parser.add_argument_group("plot")
    plot.add_argument(
        "--plot", type=plot_file, metavar="FILE", help="draw the time against the number of classes"
    )
    plot.add_argument(
        "--plot-classes",
        type=lambda text: sorted(int(part) for part in text.split(",")),
        default=list(SWEEP),
        metavar="K,K,...",
        help="numbers of classes in the plot; by default 10,000 to 4,000,000",
    )
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags; --quick and --distributed change the defaults of others."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**QUICK)
    if args.distributed:
        parser.set_defaults(losses=["dsoftmax_k"])
    args = parser.parse_args(argv)
    args.argv = list(argv)  # for the processes that --distributed starts
    return args


def check_distributed(contenders: list[Contender], args: argparse.Namespace) -> Contender:
    """Return the one contender of --distributed; refuse flags that contradict it."""
    if args.plot:
        raise ValueError("--plot is not for --distributed, which measures one number of classes")
    if len(contenders) > 1:
        raise ValueError(f"--distributed measures one loss at a time, not {len(contenders)}")
    (contender,) = contenders
    if contender.negatives != "classes":
        raise ValueError(
            "--distributed measures losses of sampled classes, as dsoftmax_k and rand_softmax, not "
            f"{contender.loss}"
        )
    if contender.dtype != "float32":
        raise ValueError("--distributed: parameter servers keep float32: leave --dtype out")
    if contender.momentum == 0:
        raise ValueError("--distributed: parameter servers always keep momenta")
    if contender.store != "device":
        raise ValueError("--distributed compares the stores: leave --store out")
    return contender


@command(parse=parse, needs=["mxnet"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    if job_process.is_in_job() and not is_worker():
        job_process.serve()
        return
    from dsoftmax.tools.benchmarks.loss import parse_contender

    contenders = [parse_contender(text, args) for text in args.losses]
    if args.distributed:
        contenders = [check_distributed(contenders, args)]
    if "DMLC_ROLE" in os.environ:
        _work(contenders[0])
        return
    report: dict[str, Any] = {"machine": _machine()}
    if not args.json:
        print(_machine_line(report["machine"]))
    measure = _measure_distributed if args.distributed else _measure
    tables = measure(contenders, args, report)
    if args.json:
        print_json(report, args.json)
        return
    print(
        f"K = {args.classes:,}, D = {args.width}, B = {args.batch_size}, "
        f"rate {Fraction(args.sample_rate).limit_denominator(10_000)}; medians of {args.steps} "
        f"steps\n\n{tables}"
    )


def _work(contender: Contender) -> None:
    from dsoftmax.tools.benchmarks import server_job

    if not job_process.is_in_job():
        raise ValueError("--distributed starts its job by itself: call it without launch.py")
    server_job.work(dataclasses.replace(contender, store="server"))


def _machine() -> dict[str, Any]:
    import mxnet

    from dsoftmax.losses import operators

    return {**describe_machine(), "mxnet": mxnet.__version__, "our_operators": operators.load()}


def _machine_line(machine: dict[str, Any]) -> str:
    return (
        "{processor}, {cores} cores, {memory_gb} GB, MXNet {mxnet}, ".format(**machine)
        + ("with" if machine["our_operators"] else "without")
        + " the operators of tools/build_operators.py"
    )


def _measure(contenders: list[Contender], args: argparse.Namespace, report: dict[str, Any]) -> str:
    """Measure the contenders, add the results to the report, return the tables."""
    from dsoftmax.tools.benchmarks import loss, loss_report

    report["results"] = results = loss.measure(contenders, args.warm_ups, args.steps)
    if args.plot:
        sampled = min(round(args.sample_rate * args.classes), round(0.8 * args.plot_classes[0]))
        report["sweep"] = loss.sweep(
            contenders, args.plot_classes, sampled, args.warm_ups, args.steps
        )
        loss_report.draw(report["sweep"], args.plot)
    return loss_report.tables(results)


def _measure_distributed(
    contenders: list[Contender], args: argparse.Namespace, report: dict[str, Any]
) -> str:
    """Measure a job and single processes, add the result to the report, return the tables."""
    from dsoftmax.tools.benchmarks import server_job, server_report

    (contender,) = contenders
    report["distributed"] = server_job.measure(contender, args.argv, args.warm_ups, args.steps)
    return server_report.tables(report["distributed"])


def _leave(code: int) -> None:
    """End this process without waiting for others of its job; see `job.leave`."""
    if "mxnet" in sys.modules:
        from dsoftmax.recognition.common.distributed import job

        job.leave(code)
    sys.exit(code)


if __name__ == "__main__":
    _leave(main())
