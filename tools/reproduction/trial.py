"""One trial: a training run, and what its embeddings are worth on people it has not seen.

    python -m dsoftmax.tools.reproduction.trial FOLDER

FOLDER holds ``trial.json`` and gets ``result.json``. `runner` starts trials as processes.
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
from dsoftmax.recognition.common.cli import command
from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.tools.reproduction.measures import measure
from dsoftmax.tools.reproduction.people import load_images

EMBEDDED_AT_ONCE = 500
COSINE_BINS = 200
LAST_ROWS = 20  # of metrics.csv, over which the last figures of training are averaged


def flags_of(trial: dict[str, Any], folder: str) -> list[str]:
    """Return the flags of ``train.py`` for a trial."""
    flags = {
        "dataset": "reproduction",
        "data-dir": os.path.join(trial["data"], "train"),
        "models-root": folder,
        "loss": trial["loss"],
        "seed": trial["seed"],
        "threads": 1,
        "devices": "cpu",
        "target": "",
        "resume": "auto",
        "ckpt": 0,
        "keep": 1,
        "frequent": 100,
        **trial["flags"],
    }
    flags.setdefault("verbose", 2000)
    options = [f"--loss-option={name}={value}" for name, value in trial["options"].items()]
    return [*(f"--{name}={value}" for name, value in flags.items()), *options]


def run_trial(trial: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train and measure.

    Parameters
    ----------
    trial : dict
        ``data``, the folder of `people.split`; ``loss`` and its ``options``; other ``flags`` of
        ``train.py``; ``seed``.
    folder : str
        For the files of the run, which are removed at the end.

    Returns
    -------
    dict
        ``validation`` and ``test`` as `measure` returns them; ``training``, the last figures of
        the log; ``classes``, the distribution of the cosines of class weights; ``seconds``.
    """
    from dsoftmax.recognition.loop import Run
    from dsoftmax.recognition.settings import parse

    started = time.perf_counter()
    run = Run(parse(flags_of(trial, os.path.join(folder, "run"))))
    if run.train():
        raise KeyboardInterrupt
    embed = run.trained.backbone.embed
    embedded = {}
    for part in ("validation", "test"):
        images, people = load_images(
            os.path.join(trial["data"], part), run.plan.pipeline.image_size
        )
        batches = range(0, len(images), EMBEDDED_AT_ONCE)
        vectors = [embed(images[at : at + EMBEDDED_AT_ONCE]) for at in batches]
        embedded[part] = np.concatenate(vectors), people
    result: dict[str, Any] = {}
    for part, other in (("validation", "test"), ("test", "validation")):
        result[part] = measure(*embedded[part], distractors=embedded[other][0])
    edges, counts = class_cosines(run.trained.head.class_weights(), COSINE_BINS)
    result["classes"] = {"edges": edges.tolist(), "counts": counts.tolist()}
    result["training"] = _last_figures(run.settings.folder)
    result["stats"] = {key: float(value) for key, value in run.trained.head.stats.items()}
    result["seconds"] = time.perf_counter() - started
    shutil.rmtree(os.path.join(folder, "run"))
    return result


def _last_figures(folder: str) -> dict[str, float]:
    """Return the columns of the log, averaged over its last rows."""
    table = np.genfromtxt(os.path.join(folder, "metrics.csv"), delimiter=",", names=True)
    last = np.atleast_1d(table)[-LAST_ROWS:]
    return {name: float(np.mean(last[name])) for name in table.dtype.names}


@command(needs=["mxnet", "opencv"])
def main(argv: list[str] | None) -> None:
    """Run the trial of a folder."""
    (folder,) = sys.argv[1:] if argv is None else argv
    with open(os.path.join(folder, "trial.json"), encoding="utf-8") as file:
        trial = json.load(file)
    result = run_trial(trial, folder)
    with AtomicFile(os.path.join(folder, "result.json"), "w") as file:
        json.dump({"trial": trial, **result}, file)


if __name__ == "__main__":
    sys.exit(main())
