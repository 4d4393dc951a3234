"""Check that MXNet and OpenCV can be loaded, and print what is installed.

    python -m dsoftmax.tools.preflight

The exit code is 1 where one of them can't be loaded.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import platform
import sys
from importlib import metadata

from dsoftmax.recognition.common.cli import command, make_parser
from dsoftmax.recognition.common.preflight import mxnet, mxnet_builds, opencv


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    return make_parser("preflight", __doc__)


@command(parser=build_parser)
def main(_: argparse.Namespace) -> int:
    """Run the command."""
    print(f"Python {platform.python_version()}")
    try:
        cv2, mx = opencv(), mxnet()
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"numpy {metadata.version('numpy')}, OpenCV {cv2.__version__}")
    print(f"{' '.join(mxnet_builds()) or 'mxnet'} {mx.__version__}, {mx.context.num_gpus()} GPUs")

    from dsoftmax.losses import operators
    from dsoftmax.recognition.common import products

    operators.load()
    print(f"on CPUs: products by {products.way(mx.cpu())}; {operators.describe()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
