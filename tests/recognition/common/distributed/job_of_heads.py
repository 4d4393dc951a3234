"""What `test_processes` has each process of a job do: heads in a group beside heads alone.

python tools/launch.py -n 2 -s 2 -- python job_of_heads.py FOLDER dist_sync
"""

import json
import os
import sys
from unittest import mock

from dsoftmax.recognition.common.distributed.parameter_server import server
from dsoftmax.recognition.common.distributed.role import is_worker

if not is_worker():
    server.serve()
    sys.exit()

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from dsoftmax import losses
from dsoftmax.recognition.common.distributed import job
from dsoftmax.recognition.common.distributed.parameter_server import rows

CLASSES, WIDTH, BATCH, STEPS, SAVED_AT = 101, 16, 12, 6, 3
SAMPLED = {"sample_rate": 0.25}
FOREST = {"sample_rate": 0.25, "trees": 4, "rebuild_every": 2}
CASES = {  # preset, store, options; "parts" is the number of micro-batches
    "full": ("dsoftmax", "device", {}),
    "full in chunks": ("arcface", "device", {"chunk": 7}),
    "rows": ("dsoftmax_b", "device", {"sample_rate": 0.5}),
    "sampled": ("dsoftmax_k", "device", SAMPLED),
    "sampled on hosts": ("dsoftmax_k", "host", SAMPLED),
    "forest": ("hf_softmax", "device", FOREST),
    "sampled on servers": ("dsoftmax_k", "server", SAMPLED),
    "corrected on servers": ("rand_softmax", "server", {**SAMPLED, "correction": "logq"}),
    "margin on servers": ("rand_arcface", "server", SAMPLED),
    "forest on servers": ("hf_softmax", "server", FOREST),
    "micro-batches": ("arcface", "device", {"parts": 3}),
    "micro-batches of rows": ("dsoftmax_b", "device", {"sample_rate": 0.1, "parts": 3}),
    "micro-batches on servers": ("dsoftmax_k", "server", {**SAMPLED, "parts": 3}),
    "filtered": ("arcface", "device", {"inter_filter": 0.2}),
    "hard negatives": ("mv_softmax", "device", {"chunk": 7}),
    "a running mean on servers": ("curricularface", "server", SAMPLED),
    "a learned number": ("uniface", "device", {"parts": 3}),
    "a learned number on servers": ("sphereface2", "server", SAMPLED),
    "several centres": ("arcface", "device", {"subcentres": 3, "chunk": 7}),
    "several centres on servers": ("cosface", "server", {**SAMPLED, "subcentres": 2}),
    "announced on servers": ("rand_softmax", "server", {**SAMPLED, "parts": 1}),
}
SGD = {"learning_rate": 0.05, "momentum": 0.9, "wd": 5e-4, "clip_gradient": 20.0}


def train(head, trainer, steps, parts=0):
    """Do steps at a falling learning rate; return losses and gradients, and the last stats.

    Each is announced if there are `parts`, the number of its micro-batches.
    """
    found = []
    for step in steps:
        draw = np.random.default_rng(step)
        embeddings = nd.array(draw.normal(size=(BATCH, WIDTH)))
        labels = draw.integers(0, CLASSES, BATCH).astype(np.int32)
        trainer.set_learning_rate(SGD["learning_rate"] / (step + 1))
        if parts:
            head.begin_update(np.split(labels, parts))
        of_step = []
        for place in np.split(np.arange(BATCH), parts or 1):
            part = embeddings[place[0] : place[-1] + 1].copy()
            part.attach_grad()
            with autograd.record():
                loss = head(part, labels[place])
            loss.backward()
            of_step.append((loss, part.grad))
        trainer.step(BATCH)
        found += [nd.concat(*arrays, dim=0).asnumpy() for arrays in zip(*of_step)]
    stats = {key: value for key, value in head.stats.items() if "seconds" not in key}
    return np.concatenate([array.reshape(-1) for array in found]), stats


def make(preset, options, **where):
    """Make a head and its trainer."""
    with mock.patch.object(rows, "LARGEST_KEY", 40 * 4 * WIDTH):  # several keys, as of millions
        head = losses.create(preset, CLASSES, WIDTH, seed=3, **where, **options)
    head.initialize()
    return head, head.trainer("sgd", SGD)


def compare(preset, store, options, group, path):
    """Return how far a head in the group is from one alone, on as many devices, and resumed."""
    options = dict(options)
    parts = options.pop("parts", 0)
    contexts = [mx.cpu(rank) for rank in range(group.size)]
    alone, alone_trainer = make(preset, options, ctx=contexts)
    head, trainer = make(preset, options, ctx=mx.cpu(0), store=store, group=group)
    found, stats = train(head, trainer, range(SAVED_AT), parts)
    expected, expected_stats = train(alone, alone_trainer, range(SAVED_AT), parts)
    trainer.save_states(path)
    weights = head.class_weights()
    rest, _ = train(head, trainer, range(SAVED_AT, STEPS), parts)
    expected_rest, _ = train(alone, alone_trainer, range(SAVED_AT, STEPS), parts)
    last = head.class_weights()
    head.load_class_weights(weights if group.is_first else None)
    trainer.load_states(path)
    resumed, _ = train(head, trainer, range(SAVED_AT, STEPS), parts)
    return {
        "before": float(np.abs(found - expected).max()),
        "after": float(np.abs(rest - expected_rest).max()),
        "weights": float(np.abs(last - alone.class_weights()).max()),
        "resumed": float(np.abs(resumed - rest).max()),
        "stats": max(abs(stats[key] - expected_stats[key]) for key in stats),
        "momenta": _momenta_differ(alone_trainer, trainer, path, group),
    }


def _momenta_differ(alone_trainer, trainer, path, group):
    trainer.save_states(path)
    if not group.is_first:
        return 0.0
    alone_trainer.save_states(path + ".alone")
    one, other = (nd.load(name)["state0"].asnumpy() for name in (path, path + ".alone"))
    return float(np.abs(one - other).max())


def exchange(group):
    """Return what the group makes of some arrays."""
    large = (1 << 40) + 3 * group.rank - 1
    repeated = [
        group.gather("again", nd.full((1, 5), 10 * turn + group.rank)).asnumpy()[:, 0].tolist()
        for turn in range(30)
    ]
    first = {"a": np.arange(3), "b": np.array([[0.1]], np.float64)} if group.is_first else {}
    received = group.broadcast("some", first)
    return {
        "sum": group.sum("sum", nd.full((2, 3), group.rank + 1)).asnumpy().tolist(),
        "repeated": repeated,
        "integers": group.gather_integers("integers", np.array([large, -1])).tolist(),
        "json": group.gather_json("json", {"rank": group.rank, "text": "é" * group.rank}),
        "odd sizes": [
            group.sum_numpy("odd", np.full(size, 1.5, np.float32)).tolist() for size in (1, 3, 5)
        ],
        "broadcast": {key: (str(v.dtype), v.tolist()) for key, v in received.items()},
    }


def main(folder, kvstore):
    """Write what this process found to FOLDER/<rank>.json."""
    group = job.join(kvstore)
    found = {"rank": group.rank, "size": group.size, "exchanged": exchange(group)}
    for name, (preset, store, options) in CASES.items():
        if store != "server" or kvstore == "dist_sync":
            path = os.path.join(folder, name.replace(" ", "-"))
            found[name] = compare(preset, store, options, group, path)
    with open(os.path.join(folder, f"{group.rank}.json"), "w", encoding="utf-8") as file:
        json.dump(found, file)
    group.close()
    job.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
