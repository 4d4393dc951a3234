"""One trial: a training run, and what its embeddings are worth on people it has not seen.

    python -m dsoftmax.tools.reproduction.trial CACHE NAME

CACHE/trials/NAME holds ``trial.json`` and gets ``result.json`` and the model. `runner` starts
trials as processes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from typing import Any

import numpy as np

from dsoftmax.eval.plots import class_cosines
from dsoftmax.losses import DSoftmax, presets
from dsoftmax.recognition.common.arrays import load_arrays, save_arrays
from dsoftmax.recognition.common.cli import command
from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.tools.reproduction.grid import INTRA, MODEL_FILE, Trial
from dsoftmax.tools.reproduction.measures import measure
from dsoftmax.tools.reproduction.people import TEST, TRAIN, VALIDATION, load_images

EMBEDDED_AT_ONCE = 500
COSINE_BINS = 400
LAST_ROWS = 20  # of metrics.csv, over which the last figures of training are averaged


class IntraOnly(DSoftmax):
    """D-Softmax without its inter part, which shows what that part is for."""

    def inter(self, F, z_y, n):
        """Return zeros, (B,)."""
        return 0 * n  # MXNet crashes in backward if n has no gradient at all, as of zeros_like


def flags_of(trial: Trial, cache: str, folder: str) -> list[str]:
    """Return the flags of ``train.py`` for a trial."""
    flags: dict[str, Any] = {
        "dataset": "reproduction",
        "data-dir": os.path.join(cache, "datasets", trial.data, TRAIN),
        "models-root": folder,
        "loss": trial.loss,
        "seed": trial.seed,
        "threads": 1,
        "devices": "cpu",
        "target": "",
        "resume": "auto",
        "ckpt": 0,
        "keep": 1,
        "frequent": 100,
        "verbose": 1000,
    }
    if trial.begin:
        path = os.path.join(cache, "trials", trial.begin.name, MODEL_FILE)
        flags["pretrained"] = f"{path[: -len('-0000.params')]},0"
    flags.update(trial.flags)
    options = [f"--loss-option={name}={value}" for name, value in trial.options.items()]
    return [*(f"--{name}={value}" for name, value in flags.items()), *options]


def run_trial(trial: Trial, cache: str) -> dict[str, Any] | None:
    """Train, measure, and leave the model with its class weights.

    Returns
    -------
    dict or None
        ``validation`` and ``test`` as `measure` returns them; ``training``, the last figures of
        the log; ``stats``, those of the last batch; ``classes``, the distribution of the cosines
        of class weights; ``seconds``. None if a signal stopped the run, which can go on later.
    """
    from dsoftmax.recognition.loop import Run
    from dsoftmax.recognition.settings import parse

    if trial.loss == INTRA:
        presets.register(INTRA, IntraOnly, "classes")
    started = time.perf_counter()
    folder = os.path.join(cache, "trials", trial.name)
    run = Run(parse(flags_of(trial, cache, os.path.join(folder, "run"))))
    if run.train():
        return None
    embed = run.trained.backbone.embed
    embedded = {}
    for part in (VALIDATION, TEST):
        source = os.path.join(cache, "datasets", trial.data, part)
        images, people = load_images(source, run.plan.pipeline.image_size)
        batches = range(0, len(images), EMBEDDED_AT_ONCE)
        vectors = [embed(images[at : at + EMBEDDED_AT_ONCE]) for at in batches]
        embedded[part] = np.concatenate(vectors), people
    result: dict[str, Any] = {
        part: measure(*embedded[part], distractors=embedded[other][0])
        for part, other in ((VALIDATION, TEST), (TEST, VALIDATION))
    }
    classes = run.trained.head.class_weights()
    edges, counts = class_cosines(classes, COSINE_BINS)
    result["classes"] = {"edges": edges.tolist(), "counts": counts.tolist()}
    result["training"] = _last_figures(run.settings.folder)
    result["stats"] = {name: float(value) for name, value in run.trained.head.stats.items()}
    parameters = load_arrays(f"{run.settings.prefix}-0000.params")
    parameters["arg:fc7_weight"] = classes
    save_arrays(os.path.join(folder, MODEL_FILE), parameters)
    result["seconds"] = time.perf_counter() - started
    shutil.rmtree(os.path.join(folder, "run"))
    return result


def _last_figures(folder: str) -> dict[str, float]:
    """Return the columns of the log, averaged over its last rows."""
    table = np.genfromtxt(os.path.join(folder, "metrics.csv"), delimiter=",", names=True)
    last = np.atleast_1d(table)[-LAST_ROWS:]
    return {name: float(np.mean(last[name])) for name in table.dtype.names}


@command(needs=["mxnet", "opencv"])
def main(argv: list[str] | None) -> int:
    """Run a trial; return 0, or 3 if a signal stopped it."""
    cache, name = sys.argv[1:] if argv is None else argv
    folder = os.path.join(cache, "trials", name)
    with open(os.path.join(folder, "trial.json"), encoding="utf-8") as file:
        trial = Trial.from_json(json.load(file))
    result = run_trial(trial, cache)
    if result is None:
        return 3
    with AtomicFile(os.path.join(folder, "result.json"), "w") as file:
        json.dump(result, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
