"""Make a checkpoint smaller: keep its embedding, drop its classifier, as insightface's model_slim.

    python tools/model_slim.py --model models/r50/model,12

writes models/r50/models-symbol.json and models/r50/models-0000.params, which give the same
embeddings without fc7 and all else that only training needs.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys

from dsoftmax.eval.models import single_model
from dsoftmax.recognition.common.cli import add_json_flag, command, make_parser, print_json


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("model_slim", __doc__)
    parser.add_argument("--model", help="checkpoint, as prefix,epoch")
    parser.add_argument(
        "--output", metavar="PREFIX", help="of the new files, by default the old one and an s"
    )
    add_json_flag(parser)
    return parser


@command(parser=build_parser, needs=["mxnet"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    from dsoftmax.eval.slimming import slim_model

    slimmed = slim_model(single_model(args.model, "prefix,epoch"), args.output)
    if args.json:
        print_json(slimmed._asdict(), args.json)
    else:
        print(slimmed)


if __name__ == "__main__":
    sys.exit(main())
