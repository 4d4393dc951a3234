"""Compile the operators that make a step on CPUs faster; optional, once per machine.

    python tools/build_operators.py

They are used from then on; DSOFTMAX_OPERATORS=0 in the environment turns them off.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from dsoftmax.recognition.common.cli import command, make_parser

# In its own process: this one may have loaded operators of an older source.
TRIAL = "import sys; from dsoftmax.losses import operators; sys.exit(not operators.load())"


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    return make_parser("build_operators", __doc__)


@command(parser=build_parser, needs=["mxnet"])
def main(_: argparse.Namespace) -> None:
    """Run the command."""
    from dsoftmax.losses import operators

    path = operators.build()
    if subprocess.run([sys.executable, "-W", "ignore", "-c", TRIAL]).returncode:
        path.unlink()
        raise ValueError("MXNet could not load what was built; it was removed again")
    print(path)


if __name__ == "__main__":
    sys.exit(main())
