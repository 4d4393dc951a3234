"""Train a face embedding, with insightface's flags on insightface's datasets.

python -u recognition/train.py --network r50 --loss dsoftmax --dataset emore
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import sys

from dsoftmax.recognition.common.cli import command
from dsoftmax.recognition.common.distributed import job
from dsoftmax.recognition.common.distributed.heartbeat import beat
from dsoftmax.recognition.common.distributed.role import is_worker
from dsoftmax.recognition.settings import Settings, parse


@command(parse=parse, needs=("mxnet", "opencv"))
def main(settings: Settings) -> int:
    """Train, and return the exit code."""
    from dsoftmax.recognition.log_lines import describe
    from dsoftmax.recognition.loop import Run

    beat("joining the others")
    group = job.join(settings.kvstore)
    run = Run(settings, group)
    if group.is_first:
        print(*describe(run.plan, run.trained.head), sep="\n", flush=True)
    try:
        stopped_by = run.train()
    except OSError as error:
        if group.size == 1:
            raise
        print(f"train: error: {error}", file=sys.stderr)
        return 1  # not refused: a disk or a network failed, and a restart may help
    group.close()
    return 128 + stopped_by if stopped_by else 0


if __name__ == "__main__":
    if is_worker():
        job.run(main)
    else:
        from dsoftmax.recognition.common.distributed.parameter_server import server

        server.serve()
