"""Write the report of a training run again, from what its folder holds.

    python tools/report.py --run models/tiny-dsoftmax-mine

report.html is one page that needs no other file: a verdict, curves, distributions, close classes,
verification and its hardest mistakes. Training writes it, too. What is gone since, such as the
dataset, is left out of the page.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys

from dsoftmax.recognition.common.cli import add_json_flag, command, make_parser, print_json


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("report", __doc__)
    parser.add_argument("--run", required=True, metavar="FOLDER", help="the folder of the run")
    parser.add_argument(
        "--output", default="", metavar="FILE.html", help="by default report.html in the folder"
    )
    add_json_flag(parser)
    return parser


def _warn(line: str) -> None:
    print(line, file=sys.stderr)


@command(parser=build_parser, needs=["opencv", "mxnet"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    from dsoftmax.recognition.report import write_report
    from dsoftmax.recognition.report.run_folder import RunFolder
    from dsoftmax.recognition.report.sections import termination_of
    from dsoftmax.recognition.report.sources import reopen
    from dsoftmax.recognition.report.verdict import judge

    run = RunFolder(args.run)
    path = write_report(run, reopen(run, _warn), args.output, _warn)
    if args.json:
        print_json(
            {"report": path, "verdict": judge(run, termination_of(run))._asdict()}, args.json
        )
    if args.json != "-":
        print(path)


if __name__ == "__main__":
    sys.exit(main())
