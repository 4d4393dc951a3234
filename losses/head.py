"""The head: class weights, the choice of negatives and a criterion, as one Gluon block."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import autograd, nd
from mxnet.gluon import Block

from dsoftmax.losses.criteria import Batch, Criterion
from dsoftmax.losses.kernels import Workspace
from dsoftmax.losses.samplers import AllClasses
from dsoftmax.losses.servers import ServerStore, ServerTrainer
from dsoftmax.losses.similarities import Similarities
from dsoftmax.losses.stores import ClassStore
from dsoftmax.losses.trainer import HeadTrainer, StaleGradientError


class Head(Block):
    """Loss of a batch of embeddings against the weights of all classes.

    Made by `dsoftmax.losses.create`.

    Parameters
    ----------
    criterion : Criterion
        Makes a loss of (z_y, n).
    sampler : AllClasses or one of its kind
        Chooses the negatives of n.
    store : ClassStore
        Holds the class weights. Where several processes share them, each must be given the
        embeddings and labels of the whole batch, and gets the loss of all of it.
    normalize : bool
        Cosines, or plain inner products.
    chunk : int, optional
        Classes at a time when n is computed, to save memory.
    mean_over_rows : bool
        With sampled rows: divide the inter part by their number instead of the batch's.
    seed : int
        Of the weights' initialization.

    Inputs:
        - **embeddings**: (B, D) float32, on any context.
        - **labels**: (B,) integers.
        - **sample_weight**: (B,), optional.

    Outputs:
        - **loss**: (B,), on the embeddings' context.
    """

    def __init__(
        self,
        criterion: Criterion,
        sampler: AllClasses,
        store: ClassStore,
        normalize: bool = True,
        chunk: int | None = None,
        mean_over_rows: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        self.criterion = criterion
        self.sampler = sampler
        self.store = store
        self.normalize = normalize
        self.chunk = chunk
        self.mean_over_rows = mean_over_rows
        self.seed = seed
        self.step = 0  # training batches seen: what is drawn is a function of (seed, step)
        self._is_initialized = False
        self._anchors: dict[mx.Context, nd.NDArray] = {}
        self._last: Similarities | None = None
        self._came_back: list[Similarities] = []
        self._last_parts: tuple = ()

    @property
    def num_classes(self) -> int:
        """K."""
        return self.store.shape[0]

    @property
    def embedding_size(self) -> int:
        """D."""
        return self.store.shape[1]

    def initialize(self, init=None, ctx=None, verbose=False, force_reinit=False) -> None:
        """Draw the class weights, by default from N(0, 0.01) as insightface does."""
        if ctx is not None:
            raise ValueError("the contexts of a head are given when it is created, not here")
        if self._is_initialized and not force_reinit:
            raise ValueError("the head is initialized already; force_reinit=True does it again")
        initializer = mx.init.create(init) if isinstance(init, str) else init
        self._drop_gradients()
        self.store.initialize(initializer or mx.init.Normal(0.01), self.seed)
        self._is_initialized = True

    def trainer(self, optimizer="sgd", optimizer_params: dict | None = None) -> HeadTrainer:
        """Return what updates the class weights, with the methods of a ``gluon.Trainer``."""
        kind = ServerTrainer if isinstance(self.store, ServerStore) else HeadTrainer
        return kind(self, optimizer, optimizer_params or {})

    def class_weights(self) -> np.ndarray:
        """Return all class weights, numpy (K, D), however they are split."""
        return self.store.read()

    def load_class_weights(self, array) -> None:
        """Set all class weights from an array (K, D); gradients of the old ones are dropped.

        Of several processes the first one's array counts; the others may give None.
        """
        if self.store.group.is_first:
            array = array.asnumpy() if isinstance(array, nd.NDArray) else np.asarray(array)
            if array.shape != self.store.shape:
                raise ValueError(
                    f"the head has class weights of shape {self.store.shape}, not {array.shape}"
                )
            if not np.isfinite(array).all():
                raise ValueError("some of the class weights are NaN or infinite")
        self._drop_gradients()
        self.store.fill(array)
        self._is_initialized = True

    def forward(self, embeddings, labels, sample_weight=None):
        """Compute the loss of each sample."""
        if not self._is_initialized:
            raise RuntimeError("the head has no weights: call initialize or load_class_weights")
        labels = self._check_labels(labels)
        norm = self._check_embeddings(embeddings, labels)
        if autograd.is_recording() and self._last is not None and not self._last.is_finished:
            self._drop_gradients()  # a new batch takes their place
        draw = self.sampler.draw(self.step, labels, embeddings)
        similarities = Similarities(
            self.store,
            labels,
            draw,
            self.criterion.scale,
            self.normalize,
            self.chunk,
            self._free_workspaces(),
            self._came_back,
        )
        z_y, n = similarities(embeddings, self._anchor_on(embeddings.context))
        inter_weight = None
        if self.mean_over_rows:
            inter_weight = len(labels) / len(draw.rows)
        arguments = self.criterion.arguments(
            Batch(self.step, norm, inter_weight, autograd.is_recording())
        )
        loss = self.criterion(z_y, n, sample_weight, *arguments)
        with autograd.pause():
            self._last_parts = self.criterion.parts(nd, z_y.detach(), n.detach(), *arguments)
        self._last = similarities
        if autograd.is_recording():
            self.step += 1
        return loss

    def _free_workspaces(self) -> list[Workspace]:
        """Return memory no batch needs any more: usually that of the last one."""
        if self._last is not None and self._last.is_finished:
            return self._last.workspaces
        return [Workspace(shard.device) for shard in self.store.shards]

    def _anchor_on(self, context: mx.Context) -> nd.NDArray:
        if context not in self._anchors:
            self._anchors[context] = nd.zeros((1,), ctx=context)
            self._anchors[context].attach_grad()
        return self._anchors[context]

    def _check_labels(self, labels) -> np.ndarray:
        labels = labels.asnumpy() if isinstance(labels, nd.NDArray) else np.asarray(labels)
        if labels.dtype.kind not in "iu":
            raise TypeError(
                f"labels must be integers, not {labels.dtype}, which is not exact for every class; "
                "make them int32 where they are read"
            )
        labels = labels.astype(np.int64)
        bad = np.flatnonzero((labels < 0) | (labels >= self.num_classes))
        if bad.size:
            raise ValueError(
                f"the label of sample {bad[0]} is {labels[bad[0]]}, but there are "
                f"{self.num_classes} classes, 0 to {self.num_classes - 1}"
            )
        return labels

    def _check_embeddings(self, embeddings, labels: np.ndarray) -> nd.NDArray:
        """Return the lengths of the embeddings, (B,)."""
        if labels.ndim != 1 or not len(labels):
            raise ValueError(f"labels must have the shape (B,), not {labels.shape}")
        if embeddings.shape != (len(labels), self.embedding_size):
            raise ValueError(
                f"embeddings must have the shape {(len(labels), self.embedding_size)} for these "
                f"labels and this head, not {embeddings.shape}"
            )
        if embeddings.dtype != np.float32:
            raise TypeError(
                f"embeddings must be float32, not {np.dtype(embeddings.dtype)}: the head is "
                "computed in full precision; cast them"
            )
        with autograd.pause():
            ones = nd.ones((self.embedding_size, 1), ctx=embeddings.context)
            norm = nd.sqrt(nd.dot(nd.square(embeddings.detach()), ones)).reshape(-1)
        bad = np.flatnonzero(~np.isfinite(norm.asnumpy()))
        if bad.size:
            raise ValueError(
                f"{bad.size} of {len(labels)} embeddings hold NaN or infinite numbers, sample "
                f"{bad[0]} is the first: the network before the head has diverged (try a lower "
                "learning rate, a warm-up or gradient clipping)"
            )
        return norm

    @property
    def stats(self) -> dict[str, float]:
        """What the last batch looked like.

        ``intra`` and ``inter`` loss (where the criterion is not dissected the whole loss is
        ``intra``), ``inter_floor`` (the inter loss if all negatives were orthogonal), ``accuracy``
        (the share of samples nearer to their own class than to any negative), the mean
        ``positive_cosine``, the mean ``negative_cosine`` and the ``max_negative_cosine``,
        ``rows_touched`` (class weights read and, in training, updated), and what the sampler has to
        tell.
        """
        if self._last is None:
            return {}
        intra, inter = (float(part.mean().asscalar()) for part in self._last_parts)
        return {"intra": intra, "inter": inter, **self._last.stats(), **self.sampler.stats}

    def take_batch(self) -> Similarities:
        """Hand out, once, the batch whose backward pass was done since the last time.

        Its `weight_gradients` are those of the class weights as they are now: they are to be asked
        for, and `is_finished` to be set, before the head is used again.
        """
        batches = self._batches_that_came_back()
        if not batches:
            raise StaleGradientError(
                "there is no new gradient since the last step: call the head under autograd.record "
                "and backward on its loss first"
            )
        if len(batches) > 1:
            raise RuntimeError(
                f"{len(batches)} batches went backward at once, but a head holds the gradients of "
                "one: call backward and step for each"
            )
        return batches[0]

    def _batches_that_came_back(self) -> list[Similarities]:
        """Return, once, the batches whose backward pass is done."""
        for anchor in self._anchors.values():  # MXNet runs backward on a thread of its own
            anchor.grad.wait_to_read()
        batches = list(self._came_back)
        self._came_back.clear()
        return batches

    def _drop_gradients(self) -> None:
        for batch in self._batches_that_came_back():
            batch.is_finished = True

    def __repr__(self) -> str:
        where = ", ".join(
            f"{shard.device}" + (f" from {shard.home}" if shard.home != shard.device else "")
            for shard in self.store.shards
        )
        if isinstance(self.store, ServerStore):
            where += " from parameter servers"
        if self.store.group.size > 1:
            where += f" and those of {self.store.group.size - 1} more processes"
        chunk = f", {self.chunk} classes at a time" if self.chunk else ""
        return (
            f"Head({self.embedding_size} -> {self.num_classes}: {self.criterion!r} against "
            f"{self.sampler!r}{chunk}; on {where})"
        )
