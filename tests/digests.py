"""Train every preset in every placement and print a digest of each result.

    python tests/digests.py --output before.json       on the commit to compare with
    python tests/digests.py --compare before.json      on yours, on the same machine

A change of structure must not change a bit: equal digests prove it. Digests depend on the processor
and on whether the operators are built, so they are compared, never stored in the repository.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from dsoftmax import losses
from dsoftmax.recognition import train
from dsoftmax.recognition.data.synthetic import make_dataset
from dsoftmax.tools import launch

CLASSES, WIDTH, BATCH, STEPS = 203, 32, 24, 20
SAMPLED = {
    "dsoftmax_k": {"sample_rate": 0.25},
    "rand_softmax": {"sample_rate": 0.5},
    "rand_arcface": {"sample_rate": 0.5},
    "hf_softmax": {"sample_rate": 0.5, "trees": 4, "rebuild_every": 7},
}
PLACEMENTS = {
    "device": {},
    "chunk": {"chunk": 50},
    "two contexts": {"ctx": [mx.cpu(0), mx.cpu(1)]},
    "host": {"store": "host"},
    "host, two contexts": {"store": "host", "ctx": [mx.cpu(0), mx.cpu(1)]},
}


def digest(*arrays: np.ndarray) -> str:
    """Return the first half of a SHA-256 over the arrays' bytes."""
    sums = hashlib.sha256()
    for array in arrays:
        sums.update(np.ascontiguousarray(array))
    return sums.hexdigest()[:32]


def train_head(preset: str, placement: dict) -> str:
    """Train a head for some steps; return the digest of losses, gradients, weights and states."""
    options = dict(SAMPLED.get(preset, {}))
    if preset == "dsoftmax_b":
        options["sample_rate"] = 0.5
    head = losses.create(preset, CLASSES, WIDTH, seed=7, **options, **placement)
    head.initialize(mx.init.Normal(0.1))
    trainer = head.trainer("sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 5e-4})
    arrays = []
    for step in range(STEPS):
        draw = np.random.default_rng(step)
        embeddings = nd.array(draw.normal(size=(BATCH, WIDTH)))
        labels = draw.integers(0, CLASSES, BATCH).astype(np.int32)
        embeddings.attach_grad()
        with autograd.record():
            loss = head(embeddings, labels)
        loss.backward()
        trainer.step(BATCH)
        arrays += [loss.asnumpy(), embeddings.grad.asnumpy()]
    stats = [value for name, value in sorted(head.stats.items()) if "seconds" not in name]
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_states(f"{folder}/states")
        saved = nd.load(f"{folder}/states")
        momenta = [saved[name].asnumpy() for name in sorted(saved) if name.startswith("state")]
    return digest(*arrays, head.class_weights(), *momenta, np.array(stats, np.float64))


def heads() -> dict[str, str]:
    """Return the digests of all presets in all placements they can have."""
    found = {}
    for preset in losses.names():
        for name, placement in PLACEMENTS.items():
            if "store" not in placement or preset in SAMPLED:
                found[f"{preset}, {name}"] = train_head(preset, placement)
    return found


def digest_of_run(models: Path) -> str:
    """Return the digest of a run's model and last state, the description left out."""
    (run,) = models.iterdir()
    (state,) = (run / "states").iterdir()
    arrays = []
    for path in (run / "model-0000.params", state / "backbone.params", state / "momenta.params"):
        saved = nd.load(str(path))
        arrays += [saved[name].asnumpy() for name in sorted(saved)]
    arrays.append(np.load(state / "classes.npy"))
    saved = nd.load(str(state / "head.states"))
    arrays += [saved[name].asnumpy() for name in sorted(saved) if name != "facts"]
    return digest(*arrays)


def runs() -> dict[str, str]:
    """Return the digests of short runs of ``train.py``, alone and on parameter servers."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        with contextlib.redirect_stderr(io.StringIO()):
            make_dataset(str(folder / "faces"), 12, 6, val_identities=6, pairs=20, size=32)
        flags = "--network tiny --dataset few --emb-size 16 --per-batch-size 8 --threads 1 --seed 5"
        flags += " --max-steps 10 --verbose 5 --frequent 5 --keep 1 --target val"
        for preset in losses.names():
            command = [sys.executable, train.__file__, *flags.split(), "--loss", preset]
            command += ["--data-dir", str(folder / "faces")]
            jobs = {"alone": command}
            if preset in SAMPLED:
                command += ["--sample-rate", "0.5"]
                job = [sys.executable, launch.__file__, "-n", "2", "-s", "2", "--", *command]
                jobs["servers"] = [*job, "--kvstore", "dist_sync"]
            for name, job in jobs.items():
                models = folder / f"{preset} {name}"
                done = subprocess.run(
                    [*job, "--models-root", str(models)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                if done.returncode:
                    raise RuntimeError(f"{preset}, {name}: {done.stdout[-3000:]}")
                found[f"train.py --loss {preset}, {name}"] = digest_of_run(models)
    return found


def main() -> int:
    """Print the digests, store them, or compare them with stored ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", help="store the digests in this file")
    parser.add_argument("--compare", help="compare with the digests in this file")
    args = parser.parse_args()
    found = {**heads(), **runs()}
    if args.output:
        Path(args.output).write_text(json.dumps(found, indent=2), encoding="utf-8")
    if not args.compare:
        print(json.dumps(found, indent=2))
        return 0
    before = json.loads(Path(args.compare).read_text(encoding="utf-8"))
    differing = [name for name in before if before[name] != found.get(name)]
    print(f"{len(before) - len(differing)} of {len(before)} digests are the same")
    print("\n".join(f"differs: {name}" for name in differing))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
