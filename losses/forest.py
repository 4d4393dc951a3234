"""Negatives that are near: the classes a random-projection forest finds for the batch."""

from __future__ import annotations

import time
from typing import Callable

import numpy as np

from dsoftmax.losses.samplers import Draw, RandomClasses, draw_others, generator


class ForestClasses(RandomClasses):
    """The approximate nearest classes of the batch's embeddings, and random ones up to the rate.

    As HF-Softmax: a forest over the class weights (Annoy's, which splits by random hyperplanes) is
    rebuilt every so many steps; in between it answers for weights that have moved on. There is no
    closed form for a class's chance to be found, hence no correction of the sampling bias.

    Parameters
    ----------
    num_classes, sample_rate, exclude_labels, seed
        As of `RandomClasses`.
    class_weights : callable
        Returns all class weights, numpy (K, D), when the forest is rebuilt.
    trees : int
        More find nearer classes and take longer; the paper's 50.
    rebuild_every : int
        Steps; the paper's 100.
    normalize : bool
        Near by angle, or by inner product.
    """

    def __init__(
        self,
        num_classes: int,
        sample_rate: float,
        exclude_labels: bool,
        class_weights: Callable[[], np.ndarray],
        trees: int = 50,
        rebuild_every: int = 100,
        normalize: bool = True,
        seed: int = 0,
    ):
        super().__init__(num_classes, sample_rate, exclude_labels, None, seed)
        try:
            import annoy
        except ImportError:
            raise ImportError(
                "the forest needs Annoy: run `pip install 'annoy>=1.17,<2'` (or dsoftmax[forest])"
            ) from None
        self._annoy = annoy
        self._class_weights = class_weights
        if trees < 1 or rebuild_every < 1:
            raise ValueError(
                f"trees and rebuild_every must be 1 or more, not {trees} and {rebuild_every}"
            )
        self.trees = trees
        self.rebuild_every = rebuild_every
        self.normalize = normalize
        self._forest = None
        self._built_at = -1
        self._stats = {"forest_rebuild_seconds": 0.0, "forest_query_seconds": 0.0}

    @property
    def stats(self) -> dict[str, float]:
        """Seconds the last rebuild and the last query took, and the step of the rebuild."""
        return {**self._stats, "forest_built_at_step": self._built_at}

    def draw(self, step: int, labels: np.ndarray, embeddings=None) -> Draw:
        """Find the classes of a step; `labels` are (B,) int64, `embeddings` (B, D) NDArray."""
        wanted_at = step - step % self.rebuild_every
        if self._forest is None or self._built_at < wanted_at or self._built_at > step:
            self._rebuild(step)
        unique = np.unique(labels)
        count = self.count if self.exclude_labels else max(0, self.count - len(unique))
        count = min(count, self.num_classes - len(unique))
        near = self._nearest(embeddings.asnumpy(), unique, count)
        fill = draw_others(
            generator(self.seed, step),
            self.num_classes,
            count - len(near),
            np.union1d(unique, near),
        )
        return Draw(np.union1d(near, fill), not self.exclude_labels)

    def _rebuild(self, step: int) -> None:
        started = time.perf_counter()
        weights = self._class_weights()
        metric = "angular" if self.normalize else "dot"
        self._forest = self._annoy.AnnoyIndex(weights.shape[1], metric)
        self._forest.set_seed(self.seed + 1)  # Annoy takes 0 for none
        for number, row in enumerate(weights):
            self._forest.add_item(number, row)
        self._forest.build(self.trees)
        self._built_at = step
        self._stats["forest_rebuild_seconds"] = time.perf_counter() - started

    def _nearest(self, embeddings: np.ndarray, labels: np.ndarray, count: int) -> np.ndarray:
        """Return up to `count` classes, each sample's nearest first, none of them a label."""
        started = time.perf_counter()
        # Each sample asks for its share, and one more for its own class.
        each = -(-count // len(embeddings)) + 1
        by_rank: dict[int, int] = {}
        for row in embeddings:
            for rank, number in enumerate(self._forest.get_nns_by_vector(row, each)):
                by_rank[number] = min(rank, by_rank.get(number, rank))
        for label in labels:
            by_rank.pop(int(label), None)
        nearest = sorted(by_rank, key=lambda number: (by_rank[number], number))[:count]
        self._stats["forest_query_seconds"] = time.perf_counter() - started
        return np.array(sorted(nearest), np.int64)

    def __repr__(self) -> str:
        return (
            f"{self.count} of {self.num_classes} classes, the nearest by {self.trees} trees, which "
            f"are rebuilt every {self.rebuild_every} steps"
        )
