"""Datasets of drawn faces: training records, verification pairs and a contact sheet.

Image `j` of identity `i` is a function of (seed, i, j) alone, so a larger dataset begins with the
smaller one. The identities in the verification pairs have numbers that no training set reaches;
they are the same for every training set of a seed.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Iterable, Iterator, Sequence

import numpy as np

from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.images import decode, encode
from dsoftmax.recognition.data.packs import write_pack
from dsoftmax.recognition.data.records import FLOAT32_EXACT, RecordWriter
from dsoftmax.recognition.data.synthetic.drawing import draw
from dsoftmax.recognition.data.synthetic.head_shape import HeadShape
from dsoftmax.recognition.data.synthetic.people import draw_identity, draw_photo

FIRST_VAL_IDENTITY = 1 << 31
PAIRS_KEY = (1 << 32) - 1  # seeds the choice of pairs; no identity has this number
FOLDS = 10
SHEET_ROWS, SHEET_COLUMNS = 10, 10


def draw_face(seed: int, identity: int, image: int, size: int = 112) -> np.ndarray:
    """Draw one picture: (size, size, 3) uint8 in OpenCV's order, blue, green, red."""
    head = HeadShape(draw_identity(seed, identity), size)
    return draw(head, draw_photo(seed, identity, image), size)


def draw_person(seed: int, identity: int, images: Sequence[int], size: int = 112) -> list[bytes]:
    """Draw some pictures of one person, as JPEGs."""
    head = HeadShape(draw_identity(seed, identity), size)
    return [encode(draw(head, draw_photo(seed, identity, image), size)) for image in images]


def choose_pairs(seed: int, identities: int, images: int, pairs: int) -> np.ndarray:
    """Choose distinct verification pairs, of one person and of two in turn.

    Returns
    -------
    (pairs, 2, 2) int64
        Each pair's two (identity, image); the identities are numbered from 0.
    """
    rng = np.random.default_rng((seed, PAIRS_KEY))
    of_identity = images * (images - 1) // 2
    person, number = np.divmod(
        rng.choice(identities * of_identity, pairs // 2, replace=False), of_identity
    )
    same = np.stack([(person, image) for image in _unordered(number)])
    two_images = images * images
    number, rest = np.divmod(
        rng.choice(identities * (identities - 1) // 2 * two_images, pairs // 2, replace=False),
        two_images,
    )
    different = np.stack(list(zip(_unordered(number), np.divmod(rest, images))))
    return np.stack([same, different]).transpose(3, 0, 1, 2).reshape(pairs, 2, 2)


def _unordered(number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count through the pairs a < b: (0, 1), (0, 2), (1, 2), (0, 3) and so on."""
    b = ((1 + np.sqrt(1 + 8 * number)) / 2).astype(np.int64)
    return number - b * (b - 1) // 2, b


def contact_sheet(rows: Sequence[Sequence[bytes]]) -> np.ndarray:
    """Lay out encoded images of one size, one row per person."""
    return np.vstack(
        [np.hstack([decode(np.frombuffer(image, np.uint8)) for image in row]) for row in rows]
    )


def make_dataset(
    output: str,
    identities: int = 1000,
    images: int = 20,
    val_identities: int = 200,
    pairs: int = 1200,
    seed: int = 1,
    size: int = 112,
    threads: int = 1,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Draw a training set, ``val.bin`` of people who are not in it, and a contact sheet.

    Parameters
    ----------
    output : str
        Folder for ``train.rec``, ``train.idx``, ``property``, ``val.bin`` and ``sheet.png``.
    identities, images : int
        People in training and pictures of each.
    val_identities, pairs : int
        People in the verification pairs, and how many pairs: half of them of one person, so in
        each tenth of the file. Without pairs (0) there is no ``val.bin``.
    seed : int
    size : int
        Height and width of the pictures.
    threads : int
        Processes that draw, if more than one; drawing holds the interpreter's lock. A script that
        asks for several needs the usual ``if __name__ == "__main__"``.
    overwrite : bool
        Replace an existing dataset.

    Returns
    -------
    dict
        Counts by name (``identities``, ``images``, ``val_identities``, ``pairs``), ``drawn``
        (images in all) and ``seconds``.
    """
    _check_arguments(identities, images, val_identities, pairs, seed, size, threads)
    start = time.perf_counter()
    chosen = choose_pairs(seed, val_identities, images, pairs)
    in_val = _images_of_people(chosen)
    people = itertools.chain(
        ((identity, range(images)) for identity in range(identities)),
        ((FIRST_VAL_IDENTITY + identity, wanted) for identity, wanted in in_val.items()),
    )
    drawn = identities * images + sum(map(len, in_val.values()))
    rows: list[list[bytes]] = []
    val_faces: dict[tuple[int, int], bytes] = {}
    with RecordWriter(output, (size, size), overwrite) as writer:
        with progress(total=drawn, desc="drawing", unit="images") as bar:
            for identity, wanted, faces in _draw_people(people, seed, size, threads):
                bar.update(len(faces))
                if identity >= FIRST_VAL_IDENTITY:
                    keys = ((identity - FIRST_VAL_IDENTITY, image) for image in wanted)
                    val_faces.update(zip(keys, faces))
                    continue
                for face in faces:
                    writer.add(identity, face)
                if len(rows) < SHEET_ROWS:
                    rows.append(faces[:SHEET_COLUMNS])
        # These come first, so that where train.rec is, all files are.
        if pairs:
            encoded = [val_faces[tuple(face)] for face in chosen.reshape(-1, 2).tolist()]
            write_pack(os.path.join(output, "val.bin"), encoded, chosen[:, 0, 0] == chosen[:, 1, 0])
        with AtomicFile(os.path.join(output, "sheet.png")) as sheet:
            sheet.write(encode(contact_sheet(rows), ".png"))
    return {
        "identities": identities,
        "images": identities * images,
        "val_identities": len(in_val),
        "pairs": pairs,
        "drawn": drawn,
        "seconds": time.perf_counter() - start,
    }


def _images_of_people(chosen: np.ndarray) -> dict[int, list[int]]:
    """List which images of which identities the pairs use, in order."""
    people: dict[int, list[int]] = {}
    for identity, image in np.unique(chosen.reshape(-1, 2), axis=0).tolist():
        people.setdefault(identity, []).append(image)
    return people


def _draw_people(
    people: Iterable[tuple[int, Sequence[int]]], seed: int, size: int, threads: int
) -> Iterator[tuple[int, Sequence[int], list[bytes]]]:
    """Yield each person's number, image numbers and images, in order."""
    if threads == 1:
        for identity, wanted in people:
            yield identity, wanted, draw_person(seed, identity, wanted, size)
        return
    context = multiprocessing.get_context("spawn")  # OpenCV's threads do not survive a fork
    with ProcessPoolExecutor(threads, context, _leave_interrupts_to_parent) as pool:

        def wait_for(person):
            identity, wanted = person
            return identity, wanted, pool.submit(draw_person, seed, *person, size).result()

        yield from map_ordered(wait_for, people, 2 * threads)  # so that no worker has to wait


def _leave_interrupts_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _check_arguments(
    identities: int,
    images: int,
    val_identities: int,
    pairs: int,
    seed: int,
    size: int,
    threads: int,
) -> None:
    ranges = {
        "identities": (identities, 1, FLOAT32_EXACT),
        "images": (images, 2 if pairs else 1, 10_000),
        "val-identities": (val_identities, 2 if pairs else 0, 100_000),
        "pairs": (pairs, 0, 10_000_000),
        "seed": (seed, 0, (1 << 32) - 1),
        "size": (size, 32, 1024),
        "threads": (threads, 1, 1024),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise ValueError(f"--{name} must be from {low} to {high}, not {value}")
    if pairs % (2 * FOLDS):
        raise ValueError(
            f"--pairs must be a multiple of {2 * FOLDS}, not {pairs}: each of the {FOLDS} folds "
            "takes as many pairs of one person as of two"
        )
    available = val_identities * (images * (images - 1) // 2)
    if pairs // 2 > available:
        raise ValueError(
            f"--pairs {pairs} needs {pairs // 2} different pairs of one person, but "
            f"--val-identities {val_identities} with --images {images} have {available}"
        )
