"""Export a trained network to an ONNX file, checked against MXNet before it is written.

    python tools/export_onnx.py --model models/r50-dsoftmax-emore/model,1 --output r50.onnx

The file takes RGB faces as (pixels - 127.5) / 127.5, which is what insightface's Python package and
servers built on it feed. With --raw-pixels it takes pixels of 0 to 255 and scales them itself;
insightface's package recognizes that.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys

from dsoftmax.eval.models import single_model
from dsoftmax.recognition.common.cli import (
    add_json_flag,
    command,
    image_size,
    make_parser,
    print_json,
)


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("export_onnx", __doc__)
    parser.add_argument("--model", help="network to export, as prefix,epoch")
    parser.add_argument("--output", required=True, metavar="FILE", help="the .onnx file to write")
    parser.add_argument(
        "--image-size",
        type=image_size,
        metavar="H,W",
        help="size of its images, by default that of its training",
    )
    parser.add_argument(
        "--raw-pixels", action="store_true", help="let the file scale pixels of 0 to 255 itself"
    )
    parser.add_argument(
        "--no-check", action="store_true", help="write the file without running it in ONNX Runtime"
    )
    add_json_flag(parser)
    return parser


@command(parser=build_parser, needs=["mxnet"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    from dsoftmax.eval.onnx_export import RAW_PIXELS, SCALED_PIXELS, export_model

    exported = export_model(
        single_model(args.model, "prefix,epoch"),
        args.output,
        args.image_size,
        RAW_PIXELS if args.raw_pixels else SCALED_PIXELS,
        is_checked=not args.no_check,
    )
    if args.json:
        print_json(exported.as_json(), args.json)
    else:
        print(exported)


if __name__ == "__main__":
    sys.exit(main())
