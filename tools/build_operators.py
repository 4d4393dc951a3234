"""Compile the operators that make a step on CPUs faster; optional, once for a machine.

    python tools/build_operators.py

They are used from then on; DSOFTMAX_OPERATORS=0 in the environment goes without.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from dsoftmax.recognition.common.cli import command
from dsoftmax.recognition.common.preflight import check_mxnet

check_mxnet()

from dsoftmax.losses import operators  # noqa: E402

# In a process of its own: this one may hold operators of an older source.
TRIAL = "import sys; from dsoftmax.losses import operators; sys.exit(not operators.load())"


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    return argparse.ArgumentParser(
        prog="build_operators",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


@command
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    build_parser().parse_args(argv)
    path = operators.build()
    if subprocess.run([sys.executable, "-W", "ignore", "-c", TRIAL]).returncode:
        path.unlink()
        raise ValueError("MXNet could not load what was built; it was removed again")
    print(path)


if __name__ == "__main__":
    sys.exit(main())
