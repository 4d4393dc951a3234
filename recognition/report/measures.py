"""What a report computes anew: z_y of some images, close classes, the age of class rows.

All of it takes seconds, however large a run is: there are limits on the images, the products and
the draws, and the results say how much of the whole they have seen.
"""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Iterator, NamedTuple

import numpy as np

from dsoftmax.recognition.common.inner_products import inner_products
from dsoftmax.recognition.common.vectors import normalized
from dsoftmax.recognition.data.images import ImageError, load_rgb
from dsoftmax.recognition.report.run_folder import RunFolder
from dsoftmax.recognition.report.sources import Sources

MOST_IMAGES, MOST_SECONDS = 1024, 5.0  # of `sample_positives`
MOST_PRODUCTS = 5e10  # multiplications of `closest_pairs`
MOST_BYTES = 1 << 30  # of class weights that it reads
ROWS_AT_ONCE = 2048
MOST_DRAWN = 15_000_000  # class rows of `row_ages`


class Positives(NamedTuple):
    """Cosines of some images with their classes."""

    z_y: np.ndarray  # (n,)
    classes: np.ndarray  # (n,) int
    images_per_class: np.ndarray  # (K,) int


def sample_positives(run: RunFolder, sources: Sources, seed: int = 0) -> Positives:
    """Embed random training images, and compare each with the weights of its class."""
    pipeline = sources.pipeline
    weights = run.class_weights()
    images, classes = pipeline.images_and_classes()
    count = min(MOST_IMAGES, len(images))
    places = np.random.default_rng(seed).choice(len(images), count, replace=False)
    cosines, seen = [], []
    started = time.monotonic()
    for start in range(0, count, sources.images_at_once):
        chosen, loaded = [], []
        for place in places[start : start + sources.images_at_once]:
            try:
                encoded = pipeline.records.read(int(images[place]))[1]
                loaded.append(load_rgb(encoded, pipeline.image_size).transpose(2, 0, 1))
                chosen.append(classes[place])
            except ImageError:
                continue  # training skips it, too
        if loaded:
            embeddings = normalized(sources.embed(np.ascontiguousarray(np.stack(loaded))))
            cosines.append((embeddings * normalized(np.array(weights[chosen]))).sum(axis=1))
            seen += chosen
        if time.monotonic() - started > MOST_SECONDS:
            break
    if not seen:
        raise ValueError("none of the images can be decoded")
    counts = np.bincount(classes, minlength=len(weights))
    return Positives(np.concatenate(cosines), np.array(seen), counts)


class ClosePair(NamedTuple):
    """Two classes whose weights are close."""

    cosine: float
    one: int
    other: int


class ClosestPairs(NamedTuple):
    """The closest pairs of classes, and how many were compared."""

    pairs: list[ClosePair]  # the closest first
    compared: int  # classes that were compared ...
    among: int  # ... with so many
    num_classes: int

    @property
    def is_exact(self) -> bool:
        """Whether all pairs were compared."""
        return self.compared == self.num_classes


def closest_pairs(weights: np.ndarray, most: int = 12, seed: int = 0) -> ClosestPairs:
    """Find the pairs of classes with the highest cosines: of all, or of a random part of many.

    Parameters
    ----------
    weights : (K, D)
        Maybe mapped from a file.
    most : int
        How many pairs to return.
    seed : int

    Notes
    -----
    If all pairs are too many, random classes are compared with all others, or with as many as
    `MOST_BYTES` hold.
    """
    total, width = weights.shape
    rng = np.random.default_rng(seed)
    blocks = [slice(at, min(at + ROWS_AT_ONCE, total)) for at in range(0, total, ROWS_AT_ONCE)]
    affordable = max(MOST_BYTES // (4 * width * ROWS_AT_ONCE), 1)
    if len(blocks) > affordable:
        kept = rng.choice(len(blocks), affordable, replace=False)
        blocks = [blocks[number] for number in np.sort(kept)]
    rows = np.concatenate([np.arange(block.start, block.stop) for block in blocks])
    among = len(rows)
    is_exact = among == total and total**2 / 2 * width <= MOST_PRODUCTS
    queries = rows
    if not is_exact:
        count = min(max(int(MOST_PRODUCTS / (among * width)), 1), among)
        queries = np.sort(rng.choice(rows, count, replace=False))
    best: list[ClosePair] = []
    for rows, block, products in _products(weights, queries, blocks, is_exact):
        floor = best[-1].cosine if len(best) == most else -math.inf
        best = _merge(best, products, rows, block, floor, most)
    return ClosestPairs(best, len(queries), among, total)


def _products(
    weights: np.ndarray, queries: np.ndarray, blocks: list[slice], is_exact: bool
) -> Iterator[tuple[np.ndarray, slice, np.ndarray]]:
    """Yield numbers of classes, a block of others, and the cosines of all of their pairs."""
    directions = normalized(np.array(weights[queries], np.float32))
    jobs = [
        (slice(at, at + ROWS_AT_ONCE), block)
        for block in blocks
        for at in range(0, len(queries), ROWS_AT_ONCE)
        if not is_exact or at <= block.start  # of all pairs, each is looked at once
    ]
    pairs = (
        (directions[part], normalized(np.array(weights[block], np.float32))) for part, block in jobs
    )
    for (part, block), products in zip(jobs, inner_products(pairs)):
        yield queries[part], block, products


def _merge(
    best: list[ClosePair],
    products: np.ndarray,
    rows: np.ndarray,
    block: slice,
    floor: float,
    most: int,
) -> list[ClosePair]:
    """Return the closest of the pairs so far and those of a block."""
    flat = products.ravel()
    # Each pair may be there twice, and each class once with itself.
    wanted = min(2 * most + len(rows), flat.size)
    candidates = np.flatnonzero(flat > floor)
    if len(candidates) > wanted:
        candidates = candidates[np.argpartition(-flat[candidates], wanted - 1)[:wanted]]
    found = {(pair.one, pair.other): pair for pair in best}
    for place in candidates:
        row, column = divmod(int(place), products.shape[1])
        one, other = sorted((int(rows[row]), block.start + column))
        if one != other:
            found[one, other] = ClosePair(float(flat[place]), one, other)
    return sorted(found.values(), reverse=True)[:most]


class RowAges(NamedTuple):
    """How many steps ago class rows were last used."""

    ages: np.ndarray  # (K,) int; 0 for the last step, -1 for rows not used in `steps`
    steps: int  # that were drawn again
    is_whole_run: bool


def row_ages(run: RunFolder, sources: Sources) -> RowAges:
    """Draw the classes of the last steps again; draws are a function of (seed, step).

    Raises
    ------
    ValueError
        The draws depend on the embeddings, or the run does not say how large its batches were.
    """
    spec, pipeline = run.settings.loss_spec(), sources.pipeline
    if spec.sampler.needs_embeddings:
        raise ValueError("the classes of a step depend on its embeddings, which are gone")
    batch_size = run.config.get("resolved_batch_size")
    if not batch_size:
        raise ValueError("config.json does not say how large the batches were")
    num_classes = run.facts["num_classes"]
    # What a sampler asks of a store; True: so that it draws, even where it could take all.
    store = SimpleNamespace(num_classes=num_classes, needs_sampled_classes=True)
    sampler = spec.make_sampler(store, run.settings.seed)
    _, classes = pipeline.images_and_classes()
    ages = np.full(num_classes, -1)
    drawn = done = 0
    step = run.facts["step"]
    for labels in _batches_backward(run, pipeline, classes, batch_size):
        negatives = sampler.draw(step - 1 - done, labels).classes
        used = np.concatenate([negatives, labels])
        ages[used[ages[used] < 0]] = done
        done += 1
        drawn += len(used)
        if drawn > MOST_DRAWN or (ages >= 0).all():
            break
    return RowAges(ages, done, done == step)


def _batches_backward(run: RunFolder, pipeline, classes: np.ndarray, size: int):
    """Yield the labels of each step, (B,) int64, from the last one to the first."""
    per_epoch = len(classes) // size
    batches = run.facts["images_seen"] // size
    for epoch in range(run.facts["epoch"], -1, -1):
        order = pipeline.permutation(epoch) if batches else ()
        for batch in range(batches - 1, -1, -1):
            yield classes[order[batch * size : (batch + 1) * size]]
        batches = per_epoch
