"""Train a face embedding, with insightface's flags on insightface's datasets.

python -u recognition/train.py --network r50 --loss dsoftmax --dataset emore
"""

from __future__ import annotations

import json
import sys

from dsoftmax.recognition.common.cli import command
from dsoftmax.recognition.common.distributed.parameter_server import server
from dsoftmax.recognition.common.distributed.role import is_worker

if __name__ == "__main__" and not is_worker():
    server.serve()  # without all that only workers need
    sys.exit()

from dsoftmax.recognition.common.distributed import job
from dsoftmax.recognition.loop import Run
from dsoftmax.recognition.networks.flops import format_flops
from dsoftmax.recognition.options import parse


@command
def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    settings = parse(argv)
    group = job.join(settings.kvstore)
    run = Run(settings, group)
    if group.is_first:
        describe(run)
    try:
        stopped_by = run.train()
    except OSError as error:
        if group.size == 1:
            raise
        print(f"train: error: {error}", file=sys.stderr)
        return 1  # not refused: a disk or a network failed, and a restart may help
    group.close()
    return 128 + stopped_by if stopped_by else 0


def describe(run: Run) -> None:
    """Print what will be trained, as insightface's scripts do."""
    settings, plan = run.settings, run.plan
    print(f"gpu num: {sum(context.device_type == 'gpu' for context in run.contexts)}")
    print(f"prefix {settings.prefix}")
    print(f"image_size {list(run.pipeline.image_size)}")
    print(f"num_classes {plan.num_classes}")
    print(f"Called with argument: {json.dumps(settings.as_json())}")
    print(f"Network FLOPs: {format_flops(plan.flops)}")
    print(f"{run.trained.head!r}")
    print(f"memory of a device: about {plan.memory}")
    for pack in plan.packs:
        print(f"ver {pack.name}")
    print(f"lr_steps {list(settings.lr_steps)}", flush=True)


if __name__ == "__main__":
    job.run(main)
