"""Embed all images of an input into a ``.npy`` file, with their names in a ``.csv`` beside it.

While a job runs, its rows are in ``<output>.partial``, and ``<output>.partial.json`` says which job
it is and how far it came. The same call goes on where a killed one stopped.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

import numpy as np

from dsoftmax.eval import metrics
from dsoftmax.eval.embed import face_batches
from dsoftmax.eval.growing_array import GrowingArray
from dsoftmax.eval.models import Model
from dsoftmax.recognition.data.identities import write_table
from dsoftmax.recognition.data.inputs import Images

COLUMNS = ("row", "name", "label", "unreadable", "fitted_from")


class Job(NamedTuple):
    """What is embedded, and how."""

    embed: Model
    images: Images
    size: tuple[int, int]  # height and width of the network's input
    flip: bool  # add the embedding of the mirror image, as verification does
    normalize: bool  # to length 1

    def depends_on(self) -> dict[str, object]:
        """Return everything that the rows depend on, as JSON can hold it."""
        return {
            "model": self.embed.name.digest(),
            "images": self.images.digest(),
            "size": list(self.size),
            "flip": self.flip,
            "normalize": self.normalize,
            "detector": self.images.find.settings() if self.images.find else None,
        }


class Embedded(NamedTuple):
    """What was embedded."""

    path: str  # of the .npy
    images: int
    width: int
    resumed_at: int  # rows that an earlier call had written
    unreadable: list[tuple[int, str]]  # (row, why); the row is 0
    fitted: list[tuple[int, tuple[int, int]]]  # (row, height and width) if it had another size


def csv_path(output: str) -> str:
    """Return the path of the table of names beside a ``.npy``."""
    return f"{os.path.splitext(output)[0]}.csv"


def embed_to_file(
    job: Job,
    output: str,
    batch_size: int = 32,
    threads: int = 2,
    overwrite: bool = False,
) -> Embedded:
    """Embed all images of a job, in order.

    Parameters
    ----------
    job : Job
    output : str
        For (images, D) float32, as ``.npy``; a row of 0 for an image that can't be read. The
        ``.csv`` beside it has the columns `COLUMNS`.
    batch_size, threads : int
    overwrite : bool
        Replace an existing file, and forget what another job has left.

    Returns
    -------
    Embedded
    """
    if not output.endswith(".npy"):
        raise ValueError(f"--output {output}: the name of embeddings ends in .npy")
    if os.path.exists(output) and not overwrite:
        raise FileExistsError(f"{output} exists; choose another --output, or --overwrite it")
    os.makedirs(os.path.dirname(output) or ".", exist_ok=True)
    count, partial = len(job.images), f"{output}.partial"
    rows = GrowingArray(partial, f"{partial}.json", count)
    job_is = [job.depends_on()]
    if rows.notes and rows.notes["job"] != job_is:
        if not overwrite:
            raise ValueError(
                f"{partial} is of another job: {_differences(rows.notes['job'][0], job_is[0])}. "
                "--overwrite begins anew; or choose another --output"
            )
        rows.forget()
    resumed_at = rows.done
    width = _fill(job, rows, job_is, batch_size, threads)
    notes = rows.notes
    unreadable = [(row, why) for row, why in notes["unreadable"]]
    fitted = [(row, tuple(given)) for row, given in notes["fitted"]]
    _write_names(job.images, csv_path(output), dict(unreadable), dict(fitted))
    os.replace(partial, output)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{partial}.json")
    return Embedded(output, count, width, resumed_at, unreadable, fitted)


def _fill(job: Job, rows: GrowingArray, job_is: list, batch_size: int, threads: int) -> int:
    """Embed the images that have no row yet; return the width of the embeddings."""
    width = job.embed(np.zeros((1, 3, *job.size), np.uint8)).shape[1]
    rows.open((width,))
    rows.notes.setdefault("job", job_is)
    numbers = range(rows.done, len(job.images))
    try:
        for batch in face_batches(
            job.embed, job.images, numbers, job.size, job.flip, batch_size, threads
        ):
            embeddings = batch.rows
            if not embeddings.size:  # none of them could be read
                embeddings = np.zeros((len(embeddings), width), np.float32)
            if job.normalize:
                embeddings = metrics.normalized(embeddings)
            rows.append(embeddings, unreadable=batch.unreadable, fitted=batch.fitted)
    finally:
        rows.close()
    return width


def _differences(theirs: dict, ours: dict) -> str:
    """Say in what two jobs differ."""
    names = {"model": "the model", "images": "the images", "size": "the image size"}
    return ", ".join(names.get(key, f"--{key}") for key in ours if theirs.get(key) != ours[key])


def _write_names(
    images: Images,
    path: str,
    unreadable: dict[int, str],
    fitted: dict[int, tuple[int, int]],
) -> None:
    rows = (
        (
            row,
            images.name(row),
            images.label(row),
            unreadable.get(row, ""),
            "{}x{}".format(*fitted[row]) if row in fitted else "",
        )
        for row in range(len(images))
    )
    write_table(path, COLUMNS, rows)
