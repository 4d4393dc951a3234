r"""Say what a run needs before it is started: memory, bytes per step, time per step, the command.

    python tools/plan.py --network r50 --loss dsoftmax_k --num-classes 757000 --devices gpu:8
    python tools/plan.py --network y1 --loss dsoftmax_k --num-classes 10000000 --devices cpu:2 \
        --store host --class-dtype float16 --memory 24
    python tools/plan.py --network r100 --loss dsoftmax_k --num-classes 100000000 \
        --devices gpu:8 --hosts 16 --device-memory 32 --memory 256

Flags are those of train.py, with the same defaults. The first table is the run you describe; the
second one has the same run with 85,742 to 100,000,000 identities, in every store. Times are for
CPUs, from a measurement of this machine that takes some seconds.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys

from dsoftmax.recognition import config as shipped
from dsoftmax.recognition.common.checks import at_least
from dsoftmax.recognition.common.cli import add_json_flag, command, make_parser, print_json
from dsoftmax.recognition.flags import FLAGS

# Those of train.py's flags that decide what a run needs.
TAKEN = (
    *("network", "emb-size", "image-size", "loss", "sample-rate", "num-classes", "store"),
    *("class-dtype", "class-parallel", "chunk", "per-batch-size", "accumulate", "devices", "mom"),
)


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("plan", __doc__, allow_abbrev=False)
    group = parser.add_argument_group("the run, as in train.py")
    for flag in FLAGS:
        if flag.name in TAKEN:
            flag.add_to(group, shipped)
    _add_own_flags(parser)
    return parser


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the machines")
    group.add_argument("--hosts", type=int, default=1, metavar="N", help="machines of the run")
    group.add_argument("--memory", type=float, metavar="GB", help="of each host")
    group.add_argument("--device-memory", type=float, metavar="GB", help="of each GPU")
    group.add_argument(
        "--no-calibration", action="store_true", help="measure nothing, and expect no times"
    )
    add_json_flag(parser)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse our own flags, and leave those of the run to train.py's parser."""
    build_parser().parse_args(argv)  # answers --help, and refuses what is none of both
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_own_flags(own)
    args, args.run = own.parse_known_args(argv)
    at_least("--hosts", args.hosts, 1)
    return args


@command(parse=_parse, needs=("mxnet",))
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    from dsoftmax.tools.planning import layouts, report

    run = layouts.describe_run(args.run, args.hosts)
    limits = layouts.Limits.of(args.memory, args.device_memory, run)
    calibration = None if args.no_calibration else layouts.calibrate(run)
    planned = layouts.plan_run(run, limits, calibration)
    others = layouts.plan_sizes(run, limits, calibration)
    if args.json != "-":
        print(report.describe(run, planned, others, calibration))
    if args.json:
        print_json(report.as_json(run, planned, others, calibration), args.json)


if __name__ == "__main__":
    sys.exit(main())
