"""Hard negatives: the classes that a random-projection forest finds near the batch."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np
from mxnet import cpu, nd

from dsoftmax.losses import operators
from dsoftmax.losses.kernels import (
    SMALLEST_NORM,
    Workspace,
    from_numpy,
    inverse_norm,
    row_products,
)
from dsoftmax.losses.samplers import (
    PAPER_RATE,
    Draw,
    RandomClasses,
    SamplerSetting,
    draw_others,
    generator,
)
from dsoftmax.losses.stores.base import ClassStore, Shard

if TYPE_CHECKING:
    from dsoftmax.losses.samplers import Rate

PLANES = 256  # shared by all trees: one matrix product gives the sides of all
DEEPEST = 16  # planes per tree: leaf numbers are uint16, which numpy sorts by radix
IGNORED = 4  # planes per tree that a sample nearly lies on
MEDIAN_OF = 4096  # classes
PROJECTED_AT_ONCE = 1 << 14  # classes
COMPARED = 8  # candidates per class that a sample asks for
COMPARED_AT_ONCE = 2048  # classes, which stay in the processor's cache


class Forest:
    """The class weights of one moment, sorted by the sides of random planes they lie on.

    A plane is perpendicular to the difference of two random classes and halves all classes. A tree
    takes some of the planes at random: classes on the same side of all of them form a leaf. A
    sample's candidates are the classes in its leaf of each tree, on both sides of the few planes
    that the sample nearly lies on. Those that agree with the sample on most of all planes are
    compared with it by their current weights.

    Made by `Forest.grow`, or from the ``state`` of another one.

    Parameters
    ----------
    store : ClassStore
        Holds the current weights.
    normalize : bool
        Whether to rank by angle, or by inner product.
    state : dict of numpy arrays
        ``built_at`` (1,) int64, the step; ``directions`` (256, D) and ``thresholds`` (256,) of the
        planes; ``planes`` (trees, depth) int32, those of each tree; ``ignored`` (1,) int64, how
        many of these a sample ignores; ``sides`` (K, 32) uint8, a bit for each plane and class;
        ``inverse_norms`` (K,).
    """

    def __init__(self, store: ClassStore, normalize: bool, state: dict[str, np.ndarray]):
        self._store = store
        self._normalize = normalize
        self._workspaces = [Workspace(shard.home) for shard in store.shards]
        self.state = state
        trees, depth = state["planes"].shape
        num_classes = store.shape[0]
        by_plane = np.ascontiguousarray(state["sides"].T)
        # The classes, leaf after leaf and tree after tree, and where each leaf starts.
        self._classes = np.empty(trees * num_classes, np.int32)
        counts = np.empty((trees, 2**depth), np.int64)
        for tree, planes in enumerate(state["planes"]):
            leaves = _leaves(by_plane, planes)
            order = self._classes[tree * num_classes : (tree + 1) * num_classes]
            order[:] = np.argsort(leaves, kind="stable")
            counts[tree] = np.bincount(leaves, minlength=2**depth)
        self._starts = np.append(0, np.cumsum(counts))

    @classmethod
    def grow(
        cls, store: ClassStore, normalize: bool, trees: int, leaf: int, seed: int, step: int
    ) -> Forest:
        """Make a forest of the current weights.

        Parameters
        ----------
        store, normalize
            As for the class.
        trees : int
        leaf : int
            Classes that a sample finds per tree, approximately.
        seed, step : int
            The random numbers are a function of them.
        """
        random = generator(seed, step, stream=1)
        num_classes = store.shape[0]
        ends = _directions_of(store, random.integers(num_classes, size=2 * PLANES))
        directions = _normalized(ends[:PLANES] - ends[PLANES:])
        count = min(MEDIAN_OF, num_classes)
        some = _directions_of(store, random.choice(num_classes, count, replace=False))
        # A bit above the median, which may be a class: rounding would decide its side.
        thresholds = np.median(some @ directions.T, axis=0) + 1e-5
        needed = min(max(round(math.log2(num_classes / leaf)), 0), DEEPEST)
        depth = min(needed + IGNORED, DEEPEST)
        planes = [random.choice(PLANES, depth, replace=False) for _ in range(trees)]
        # Processors round differently: all processes must have the same planes.
        ours = {"directions": directions, "thresholds": thresholds}
        directions, thresholds = store.group.broadcast("planes", ours).values()
        sides, inverse_norms = _project(store, directions, thresholds)
        return cls(
            store,
            normalize,
            {
                "built_at": np.array([step]),
                "directions": directions,
                "thresholds": thresholds,
                "planes": np.array(planes, np.int32),
                "ignored": np.array([depth - needed]),
                "sides": sides,
                "inverse_norms": inverse_norms,
            },
        )

    def nearest(self, embeddings: np.ndarray, each: int) -> list[np.ndarray]:
        """Return up to `each` classes near each sample, the nearest first, int64.

        Parameters
        ----------
        embeddings : (B, D)
            Of any length.
        each : int
        """
        embeddings = _normalized(embeddings)
        group, ours = self._store.group, {}
        if group.is_first:  # others might round, and so choose, differently
            chosen = self._choose(embeddings, COMPARED * each)
            sizes = np.array([len(classes) for classes in chosen])
            ours = {"classes": np.concatenate(chosen), "sizes": sizes}
        classes, sizes = group.broadcast("candidates", ours).values()
        candidates = np.split(classes, np.cumsum(sizes)[:-1])
        similarities = self._compare(embeddings, candidates)
        return [self._rank(*sample)[:each] for sample in zip(candidates, similarities)]

    def _choose(self, embeddings: np.ndarray, count: int) -> list[np.ndarray]:
        """Return up to `count` candidates of each normalised sample, sorted."""
        margins = embeddings @ self.state["directions"].T - self.state["thresholds"]
        sides = np.packbits(margins > 0, axis=1).view(np.uint64)
        leaves = self._leaves_around(margins)
        if operators.serve(cpu()):
            of_classes = self.state["sides"].view(np.uint64)
            forest = self._classes, self._starts
            return operators.find_candidates(*forest, leaves, of_classes, sides, count)
        return [self._candidates(*sample, count) for sample in zip(leaves, sides)]

    def _leaves_around(self, margins: np.ndarray) -> np.ndarray:
        """Return the leaves of all trees around each sample, (B, leaves) int64.

        Parameters
        ----------
        margins : (B, 256)
            How far samples lie above planes.
        """
        planes = self.state["planes"]
        trees, depth = planes.shape
        margins = margins[:, planes]
        # A product of float32, which holds such numbers exactly, takes half the time of int64.
        leaves = (margins > 0).astype(np.float32) @ (2.0 ** np.arange(depth)[::-1]).astype("f4")
        leaves = (leaves.astype(np.int64) + (np.arange(trees) << depth))[:, :, None]
        nearest = np.argsort(np.abs(margins), axis=2)[:, :, : int(self.state["ignored"])]
        for place in np.moveaxis(nearest, 2, 0)[..., None]:
            leaves = np.concatenate([leaves, leaves ^ (1 << depth - 1 - place)], axis=2)
        return leaves.reshape(len(margins), -1)

    def _candidates(self, leaves: np.ndarray, sides: np.ndarray, count: int) -> np.ndarray:
        """Return up to `count` classes of some leaves, sorted: those most like the sample.

        Parameters
        ----------
        leaves : (leaves,) int64
        sides : (4,) uint64
            Of the sample.
        count : int
        """
        stops = self._starts[leaves + 1]
        sizes = stops - self._starts[leaves]
        places = np.arange(sizes.sum()) + np.repeat(stops - np.cumsum(sizes), sizes)
        classes = np.unique(self._classes[places])
        if len(classes) <= count:
            return classes
        differ = self.state["sides"].view(np.uint64).take(classes, axis=0)
        differ ^= sides
        # numpy sorts uint16 by radix, which takes less time than a partition.
        nearest = np.argsort(_bits_set(differ).astype(np.uint16), kind="stable")[:count]
        return np.sort(classes[nearest])

    def _compare(self, embeddings: np.ndarray, candidates: list[np.ndarray]) -> list[np.ndarray]:
        """Return the similarities of normalised samples (B, D) to the candidates of each."""
        sizes = [len(classes) for classes in candidates]
        classes, similarity = np.concatenate(candidates), np.zeros(sum(sizes), np.float32)
        sample = np.repeat(np.arange(len(sizes)), sizes)
        pending = []
        for shard, workspace in zip(self._store.shards, self._workspaces):
            owned = np.flatnonzero(shard.owned(classes))
            rows, of = classes[owned] - shard.start, sample[owned]
            vectors = from_numpy(embeddings, shard.home, "float32")
            if operators.serve(shard.home) and shard.holds_floats:
                pending.append((owned, row_products(shard.weight, rows, vectors, of)))
                continue
            for start in range(0, len(owned), COMPARED_AT_ONCE):
                block = slice(start, start + COMPARED_AT_ONCE)
                products = _block_products(shard, rows[block], vectors, of[block], workspace)
                pending.append((owned[block], products))
        for places, products in pending:  # only now wait for MXNet
            similarity[places] = products.asnumpy()
        similarity = self._store.group.sum_numpy("similarities", similarity)
        if self._normalize:
            similarity *= self.state["inverse_norms"][classes]
        return np.split(similarity, np.cumsum(sizes)[:-1])

    def _rank(self, classes: np.ndarray, similarity: np.ndarray) -> np.ndarray:
        """Return the classes, the most similar first."""
        # The last digits depend on how the classes are split over devices. Without them equal
        # weights are equally near, and the number of the class decides.
        is_number = np.isfinite(similarity)
        similarity = np.where(is_number, similarity, 0)
        unit = 1e-5 * max(np.abs(similarity).max(initial=0), SMALLEST_NORM)
        num_classes = self._store.shape[0]
        # A class that diverged comes first, so that the loss shows it.
        steps = np.where(is_number, np.rint(similarity / -unit), -1e6).astype(np.int64)
        return np.sort(steps * num_classes + classes) % num_classes


def _block_products(
    shard: Shard, rows: np.ndarray, vectors: nd.NDArray, places: np.ndarray, workspace: Workspace
) -> nd.NDArray:
    """Return the inner product of each of n class rows and a vector, (n,).

    Parameters
    ----------
    shard : Shard
    rows : (n,) int64
    vectors : (B, D)
    places : (n,) int64
        Which of the vectors, sorted: one product for a few of them costs less than one for each.
    workspace : Workspace
    """
    weight = workspace.get("rows", len(rows), vectors.shape[1])
    shard.take(rows, weight)
    some = vectors[int(places[0]) : int(places[-1]) + 1]
    products = nd.FullyConnected(some, weight, no_bias=True, num_hidden=len(rows))
    return nd.pick(products, from_numpy(places - places[0], shard.home), axis=0)


def _bits_set(words: np.ndarray) -> np.ndarray:
    """Return how many bits of each row are set, (n,) uint64, and overwrite the rows.

    Sums of neighbouring bits, of pairs, of groups of four and so on, 64 bits at a time: a table of
    the counts of all uint16 takes twice as long.

    Parameters
    ----------
    words : (n, m) uint64
    """
    one, two, four, eight, last = np.array([1, 2, 4, 8, 48], np.uint64)
    halves = words >> one
    halves &= np.uint64(0x5555555555555555)
    words -= halves
    np.right_shift(words, two, out=halves)
    halves &= np.uint64(0x3333333333333333)
    words &= np.uint64(0x3333333333333333)
    words += halves
    np.right_shift(words, four, out=halves)
    words += halves
    words &= np.uint64(0x0F0F0F0F0F0F0F0F)
    counts = words.T.copy().sum(axis=0)
    every_other = np.uint64(0x00FF00FF00FF00FF)
    counts = (counts & every_other) + (counts >> eight & every_other)
    return counts * np.uint64(0x0001000100010001) >> last


def _normalized(vectors: np.ndarray) -> np.ndarray:
    """Return vectors (n, D) of length 1, and those without a direction as they are."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), SMALLEST_NORM)


def _directions_of(store: ClassStore, classes: np.ndarray) -> np.ndarray:
    """Return the normalised weights of some classes, (n, D)."""
    rows = np.zeros((len(classes), store.shape[1]), np.float32)
    for shard in store.shards:
        owned = shard.owned(classes)
        if owned.any():
            rows[owned] = shard.take(classes[owned] - shard.start).asnumpy()
    return _normalized(store.group.sum_numpy("directions", rows))


def _project(
    store: ClassStore, directions: np.ndarray, thresholds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sides of all classes, (K, 32) uint8, and their inverse norms, (K,)."""
    sides = np.zeros((store.shape[0], PLANES // 8), np.uint8)
    inverse_norms = np.zeros(store.shape[0], np.float32)
    for shard in store.shards:
        workspace = Workspace(shard.home)
        normals = nd.array(directions, ctx=shard.home)
        for start in range(0, len(shard), PROJECTED_AT_ONCE):
            weight = shard.block(start, min(start + PROJECTED_AT_ONCE, len(shard)))
            inverse = inverse_norm(weight, workspace.get("scratch", *weight.shape))
            projections = nd.FullyConnected(
                weight,
                normals,
                no_bias=True,
                num_hidden=PLANES,
                out=workspace.get("projections", len(weight), PLANES),
            )
            nd.broadcast_mul(projections, inverse, out=projections)
            block = slice(shard.start + start, shard.start + start + len(weight))
            sides[block] = np.packbits(projections.asnumpy() > thresholds, axis=1)
            inverse_norms[block] = inverse.asnumpy()[:, 0]
    group = store.group
    return group.sum_numpy("sides", sides), group.sum_numpy("inverse norms", inverse_norms)


def _leaves(sides: np.ndarray, planes: np.ndarray) -> np.ndarray:
    """Return the leaves of a tree some vectors are in.

    Parameters
    ----------
    sides : (32, n) uint8
        Of the vectors.
    planes : (depth,)
        Of the tree.

    Returns
    -------
    (n,) uint16
    """
    leaves = np.zeros(sides.shape[1], np.uint16)
    for byte, bit in zip(planes // 8, planes % 8):
        leaves = leaves << 1 | (sides[byte] >> (7 - bit) & 1)
    return leaves


class ForestClasses(RandomClasses):
    """The approximate nearest classes of the batch's embeddings, and random ones up to the rate.

    As in HF-Softmax, a forest over the class weights is rebuilt from time to time; in between the
    weights move on. A class's probability to be drawn has no closed form, hence no correction of
    the sampling bias.

    Parameters
    ----------
    store : ClassStore
        The class weights.
    sample_rate, batch_classes, seed
        As for `RandomClasses`.
    trees : int
        More trees find nearer classes and take longer; the paper has 50.
    rebuild_every : int
        Steps; the paper has 100.
    normalize : bool
        Whether to rank by angle, or by inner product.
    """

    needs_embeddings = True

    def __init__(
        self,
        store: ClassStore,
        sample_rate: Rate,
        batch_classes: str,
        trees: int = 50,
        rebuild_every: int = 100,
        normalize: bool = True,
        seed: int = 0,
    ):
        if store.subcentres > 1:
            raise ValueError(
                "a forest looks for class weights, not for the nearest of several centres per "
                "class: choose other negatives, or subcentres=1"
            )
        super().__init__(store.num_classes, sample_rate, batch_classes, None, seed)
        if trees < 1 or rebuild_every < 1:
            raise ValueError(
                f"trees and rebuild_every must be 1 or more, not {trees} and {rebuild_every}"
            )
        self.trees = trees
        self.rebuild_every = rebuild_every
        self.normalize = normalize
        self._store = store
        self._forest: Forest | None = None
        self._stats = {"forest_rebuild_seconds": 0.0, "forest_query_seconds": 0.0}

    @classmethod
    def make(
        cls,
        setting: SamplerSetting,
        *,
        sample_rate: Rate = PAPER_RATE,
        batch_classes: str | None = None,
        correction: None = None,
        trees: int = 50,
        rebuild_every: int = 100,
    ) -> ForestClasses:
        """Make the sampler of a head."""
        if correction is not None:
            raise ValueError(
                "correction: a forest has no closed form for a class's probability to be found; "
                "leave it out"
            )
        return cls(
            setting.store,
            sample_rate,
            batch_classes or setting.usual_batch_classes,
            trees,
            rebuild_every,
            setting.normalize,
            setting.seed,
        )

    @property
    def built_at(self) -> int:
        """The step of the last rebuild, -1 before the first."""
        return -1 if self._forest is None else int(self._forest.state["built_at"][0])

    @property
    def stats(self) -> dict[str, float]:
        """Seconds the last rebuild and the last query took, and the step of the rebuild."""
        return {**self._stats, "forest_built_at_step": self.built_at}

    @property
    def state(self) -> dict[str, np.ndarray]:
        """The forest, to be saved with a checkpoint; nothing before the first draw."""
        return {} if self._forest is None else self._forest.state

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue with a saved forest, or with a new one if the state is empty."""
        if state and (len(state["sides"]), state["directions"].shape[1]) != self._store.shape:
            raise ValueError(
                f"the forest is one of {len(state['sides'])} classes of width "
                f"{state['directions'].shape[1]}, the head has {self._store.shape[0]} of "
                f"{self._store.shape[1]}"
            )
        self._forest = Forest(self._store, self.normalize, state) if state else None

    def draw(self, step: int, labels: np.ndarray, embeddings=None) -> Draw:
        """Find the classes of a step; `labels` are (B,) int64, `embeddings` (B, D) NDArray."""
        unique = np.unique(labels)
        count = self.count_random(step, len(unique))
        each = self._each(count, len(labels))
        if not step - step % self.rebuild_every <= self.built_at <= step:
            self._rebuild(step, each)
        near = self._nearest(embeddings.asnumpy(), each, unique, count)
        fill = draw_others(
            generator(self.seed, step),
            self.num_classes,
            count - len(near),
            np.union1d(unique, near),
        )
        return Draw(np.union1d(near, fill), self.labels_are_negatives)

    def _each(self, count: int, batch: int) -> int:
        """Return how many classes a sample asks for: its share, and one more for its own class."""
        return -(-count // batch) + 1

    def _rebuild(self, step: int, leaf: int) -> None:
        started = time.perf_counter()
        self._forest = None  # two at once would double the memory
        self._forest = Forest.grow(self._store, self.normalize, self.trees, leaf, self.seed, step)
        self._stats["forest_rebuild_seconds"] = time.perf_counter() - started

    def _nearest(
        self, embeddings: np.ndarray, each: int, labels: np.ndarray, count: int
    ) -> np.ndarray:
        """Return up to `count` classes, each sample's nearest first, none of them a label."""
        started = time.perf_counter()
        nearest = self._forest.nearest(embeddings, each)
        rank = np.concatenate([np.arange(len(classes)) for classes in nearest])
        classes = np.concatenate(nearest)
        classes = classes[np.lexsort((classes, rank))]
        classes, first = np.unique(classes, return_index=True)  # where a class has its best rank
        is_other = ~np.isin(classes, labels)
        best = classes[is_other][np.argsort(first[is_other])[:count]]
        self._stats["forest_query_seconds"] = time.perf_counter() - started
        return np.sort(best)

    def __repr__(self) -> str:
        return (
            f"{self.rate.describe(self.num_classes)}, the nearest by {self.trees} trees, which "
            f"are rebuilt every {self.rebuild_every} steps"
        )


class MixedClasses(ForestClasses):
    """The batch's classes, the few nearest ones of each sample, and random ones up to the rate.

    Hard negatives at a fraction of what a forest costs that has to find all of them.

    Parameters
    ----------
    nearest : int
        Classes of the forest per sample.
    **options
        As for `ForestClasses`.
    """

    def __init__(self, *args, nearest: int = 8, **options):
        super().__init__(*args, **options)
        if nearest < 1:
            raise ValueError(f"nearest must be 1 or more, not {nearest}")
        self.nearest = nearest

    @classmethod
    def make(
        cls,
        setting: SamplerSetting,
        *,
        sample_rate: Rate = PAPER_RATE,
        batch_classes: str = "counted",
        nearest: int = 8,
        trees: int = 10,
        rebuild_every: int = 100,
    ) -> MixedClasses:
        """Make the sampler of a head."""
        return cls(
            setting.store,
            sample_rate,
            batch_classes,
            trees,
            rebuild_every,
            setting.normalize,
            setting.seed,
            nearest=nearest,
        )

    def _each(self, count: int, batch: int) -> int:
        """Return how many classes a sample asks for, one more for its own class."""
        return min(self.nearest + 1, super()._each(count, batch))

    def __repr__(self) -> str:
        return (
            f"{self.rate.describe(self.num_classes)}, the {self.nearest} nearest of each sample "
            f"by {self.trees} trees, which are rebuilt every {self.rebuild_every} steps, and "
            "random ones"
        )
