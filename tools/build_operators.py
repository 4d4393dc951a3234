"""Compile the operators that make a step on CPUs faster, and say why if that fails.

    python tools/build_operators.py

The first head on a CPU does this by itself, into the user's cache (DSOFTMAX_CACHE names another
folder). DSOFTMAX_OPERATORS=0 in the environment turns the operators off.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys

from dsoftmax.recognition.common.cli import command, make_parser


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    return make_parser("build_operators", __doc__)


@command(parser=build_parser, needs=["mxnet"])
def main(_: argparse.Namespace) -> None:
    """Run the command."""
    from dsoftmax.losses import operators

    print(operators.build())


if __name__ == "__main__":
    sys.exit(main())
