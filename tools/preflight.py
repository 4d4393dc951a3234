"""Check that MXNet and OpenCV can be loaded, and print what is installed."""

from __future__ import annotations

import argparse
import platform
import sys
from importlib import metadata

from dsoftmax.recognition.common.preflight import check_mxnet, check_opencv, mxnet_builds


def main(argv: list[str] | None = None) -> int:
    """Print what is installed; the exit code is 1 where something that is needed is not."""
    argparse.ArgumentParser(prog="preflight", description=__doc__.split("\n")[0]).parse_args(argv)
    print(f"Python {platform.python_version()}")
    try:
        check_opencv()
        check_mxnet()
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    cv2, mx = sys.modules["cv2"], sys.modules["mxnet"]
    print(f"numpy {metadata.version('numpy')}, OpenCV {cv2.__version__}")
    print(f"{' '.join(mxnet_builds()) or 'mxnet'} {mx.__version__}, {mx.context.num_gpus()} GPUs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
