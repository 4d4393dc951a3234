"""Reproduce the paper's tables, figures and claims, at a scale that two cores can run.

    python tools/reproduce.py table1                     train, measure and lay out a table
    python tools/reproduce.py all --time-budget 8        everything, for at most 8 hours
    python tools/reproduce.py claims                     the verdicts on what was trained so far
    python tools/reproduce.py all --quick                how it works, in ten minutes
    python tools/reproduce.py table1 --scale full        the commands for MS1M and GPUs

Trials are kept in --output and never run twice. A command that was stopped goes on where it was,
and one that finds a trials.csv in --output runs only what that file lacks.
Each verdict is made of paired differences over seeds: the same images in the same order, the same
first weights. What d and which margin are compared is chosen on people that no verdict is made on.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import math
import os
import sys

from dsoftmax.recognition.common.cli import command, default_threads, make_parser

TRAINED = ("table1", "table2", "table3", "figure4", "figure5")
DRAWN = ("figure1", "figure2", "figure3")
TARGETS = (*TRAINED, *DRAWN, "claims", "all")
SECONDS_PER_HOUR = 3600
# Flags that describe how to train on --data-dir.
OWN = (
    *("held_out", "part", "logit_scale", "batch_size", "steps", "foundation_steps"),
    *("rand_mirror", "only"),
)


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("reproduce", __doc__)
    parser.add_argument("target", choices=TARGETS, nargs="+", help="what to reproduce")
    parser.add_argument(
        "--scale",
        choices=("small", "full"),
        default="small",
        help="small: on this machine; full: print the commands for the paper's datasets and GPUs",
    )
    parser.add_argument("--quick", action="store_true", help="a demonstration that decides nothing")
    parser.add_argument("--output", default="reproduction", help="folder of trials and results")
    parser.add_argument(
        "--time-budget", type=float, default=math.inf, metavar="HOURS", help="stop after this time"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="trials per row (default: 5)")
    parser.add_argument(
        "--workers", type=int, default=default_threads(), metavar="N", help="trials at a time"
    )
    own = parser.add_argument_group("your own dataset, instead of synthetic faces")
    own.add_argument("--data-dir", metavar="DIR", help="a dataset, of which people are held out")
    own.add_argument(
        "--held-out",
        type=int,
        default=300,
        metavar="N",
        help="people to choose settings with, and as many others to test on",
    )
    own.add_argument("--part", type=int, default=64, help="the main sampling rate is 1 / PART")
    own.add_argument("--logit-scale", type=float, default=16, metavar="S", help="the scale s")
    own.add_argument("--batch-size", type=int, default=62, metavar="N", help="images per step")
    own.add_argument("--steps", type=int, default=5000, metavar="N", help="steps of a trial")
    own.add_argument(
        "--foundation-steps",
        type=int,
        default=20000,
        metavar="N",
        help="steps of the network that all trials of a seed begin with; 0 for random weights",
    )
    own.add_argument("--rand-mirror", type=int, choices=(0, 1), default=1, help="mirror images")
    own.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="ROW",
        help="train these rows alone, by their names in trials.csv: softmax, d-0.9, k-0.9, ...",
    )
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags; refuse those of a dataset that is not given."""
    parser = build_parser()
    args = parser.parse_args(argv)
    idle = [flag for flag in OWN if getattr(args, flag) != parser.get_default(flag)]
    if idle and not args.data_dir:
        raise ValueError(f"--{idle[0].replace('_', '-')} needs --data-dir, the dataset it is for")
    return args


@command(parse=parse, needs=["mxnet", "opencv"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    from dsoftmax.tools.reproduction import full_scale, outcomes, report, scales, speed
    from dsoftmax.tools.reproduction.runner import Runner
    from dsoftmax.tools.reproduction.study import Study

    targets = [*TRAINED, *DRAWN, "claims"] if "all" in args.target else args.target
    if args.scale == "full":
        print(full_scale.commands(targets))
        return
    if args.quick:
        faces, settings = scales.QUICK_FACES, [scales.quick_setting(args.seeds or 2)]
    else:
        faces, settings = scales.SMALL_FACES, scales.small_settings(args.seeds or 5)
    trained = [target for target in targets if target in TRAINED]
    runner = Runner(args.output, args.workers, args.time_budget * SECONDS_PER_HOUR)
    if args.data_dir:
        settings = [scales.own_setting(args)]
        source = args.data_dir
        scales.prepare(settings[0].data, args.output, args.held_out, lambda _: source)
    elif trained:
        faces.prepare(args.output, args.workers)
    known = outcomes.read(os.path.join(args.output, report.TRIALS))
    studies = [Study(runner, setting, known) for setting in settings]
    for study in studies:
        if trained and not runner.is_over:
            study.run(trained)
    if "table3" in targets and not runner.is_over:
        speed.measure(args.output, speed.QUICK_SIZE if args.quick else speed.PAPERS_SIZE)
    report.write(args.output, targets, studies, runner)
    print(f"Results are in {os.path.join(args.output, report.PAGE)}")


if __name__ == "__main__":
    sys.exit(main())
