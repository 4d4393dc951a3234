"""Train a face embedding, with insightface's flags on insightface's datasets.

python -u recognition/train.py --network r50 --loss dsoftmax --dataset emore
"""

from __future__ import annotations

import json
import sys

from dsoftmax.tools.cli import command
from dsoftmax.tools.preflight import check_mxnet

check_mxnet()

from dsoftmax.recognition.loop import Run  # noqa: E402
from dsoftmax.recognition.options import parse  # noqa: E402


@command
def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    settings = parse(argv)
    run = Run(settings)
    print(f"gpu num: {sum(context.device_type == 'gpu' for context in run.contexts)}")
    print(f"prefix {settings.prefix}")
    print(f"image_size {list(run.pipeline.image_size)}")
    print(f"num_classes {run.num_classes}")
    print(f"Called with argument: {json.dumps(settings.as_json())}")
    print(f"{run.trained.head!r}")
    print(f"memory of a device: about {run.memory}")
    for pack in run.packs:
        print(f"ver {pack.name}")
    print(f"lr_steps {list(settings.lr_steps)}", flush=True)
    stopped_by = run.train()
    return 128 + stopped_by if stopped_by else 0


if __name__ == "__main__":
    sys.exit(main())
