"""What `test_parameter_server` has each worker of a job do: hundreds of steps of one head.

python tools/launch.py -n 1 -s 1 -- python job_of_steps.py FILE
"""

import gc
import json
import os
import sys

from dsoftmax.recognition.common.distributed.role import is_worker

if not is_worker():
    from dsoftmax.recognition.common.distributed.parameter_server import server

    server.serve()
    sys.exit()

import mxnet as mx
from mxnet import autograd, nd

from dsoftmax import losses
from dsoftmax.losses.step import Step
from dsoftmax.recognition.common.distributed import job
from dsoftmax.recognition.common.memory import resident_bytes


def main(path):
    """Write memory, live steps, open files and threads after 100 and after 500 steps."""
    group = job.join("dist_sync")
    head = losses.create("dsoftmax_k", 600, 128, sample_rate=0.1, store="server", group=group)
    head.initialize()
    trainer = head.trainer("sgd", {"learning_rate": 0.1, "momentum": 0.9})
    embeddings = nd.random.normal(shape=(128, 128), ctx=mx.cpu(0))
    embeddings.attach_grad()
    usage = []
    for step in range(501):
        with autograd.record():
            loss = head(embeddings, list(range(128)))
        loss.backward()
        trainer.step(128)
        if step in (100, 500):
            nd.waitall()
            gc.collect()
            steps = sum(isinstance(thing, Step) for thing in gc.get_objects())
            files, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
            usage.append([resident_bytes() / 1e6, steps, files, threads])
    with open(path, "w", encoding="utf-8") as file:
        json.dump(usage, file)
    group.close()
    job.leave(0)


if __name__ == "__main__":
    main(sys.argv[1])
