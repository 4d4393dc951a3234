"""The head: class weights, the choice of negatives and a criterion, as one Gluon block."""

from __future__ import annotations

from typing import Iterator

import mxnet as mx
import numpy as np
from mxnet import autograd, nd
from mxnet.gluon import Block

from dsoftmax.losses.criteria import Batch, Criterion
from dsoftmax.losses.kernels import SMALLEST_NORM, RowGradient, Workspace, row_sum
from dsoftmax.losses.samplers import AllClasses
from dsoftmax.losses.servers import ServerStore, ServerTrainer
from dsoftmax.losses.step import Step, StepInputs
from dsoftmax.losses.stores import LARGEST_ARRAY, ClassStore
from dsoftmax.losses.trainer import HeadTrainer, StaleGradientError
from dsoftmax.recognition.common.arrays import save_arrays

CLASS_WEIGHT = "class_weight"  # what `save_parameters` calls them
SUPERSEDED_STEPS = 4  # watched for a backward pass that comes too late


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
        self._forget_steps()

    def _forget_steps(self) -> None:
        """Drop all that belongs to batches seen so far, but for their number."""
        self._pending: Step | None = None  # the last training batch, until its update
        self._superseded: list[Step] = []  # training batches before it that had no update
        self._idle_workspaces: list[Workspace] | None = None
        self._last: tuple[Step, dict[str, nd.NDArray]] | None = None  # for `stats`

    def __getstate__(self) -> dict:
        copied = Head.__new__(Head)
        copied.__dict__.update(self.__dict__)
        copied._forget_steps()
        return copied.__dict__

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
        self._forget_steps()
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
        self._forget_steps()
        self.store.fill(array)
        self._is_initialized = True

    def save_parameters(self, filename, deduplicate: bool = False) -> None:
        """Save all class weights, (K, D) however they are split, as one array ``class_weight``.

        Of several processes, which must all call it, the first writes the file.
        """
        if self.num_classes * self.embedding_size > LARGEST_ARRAY:
            raise ValueError(
                f"{self.num_classes} x {self.embedding_size} class weights are more than an MXNet "
                "array holds: save class_weights() with numpy"
            )
        weights = self.class_weights()
        if self.store.group.is_first:
            save_arrays(filename, {CLASS_WEIGHT: weights})

    def load_parameters(self, filename, *_, **__) -> None:
        """Load what `save_parameters` saved, on any number of devices.

        Of several processes, which must all call it, the first reads the file.
        """
        weights = None
        if self.store.group.is_first:
            saved = nd.load(str(filename))
            if not isinstance(saved, dict) or set(saved) != {CLASS_WEIGHT}:
                raise ValueError(f"{filename}: not the parameters of a head, {CLASS_WEIGHT} alone")
            weights = saved[CLASS_WEIGHT]
        self.load_class_weights(weights)

    def _collect_params_with_prefix(self, prefix: str = "") -> dict:
        """Refuse to be a part of another block's file, which would lack the class weights."""
        raise ValueError(
            "class weights are no gluon.Parameters, so that a file of the block around this head "
            "would lack them: save and load the head by its own save_parameters, and the network "
            "by its own"
        )

    def forward(self, embeddings, labels, sample_weight=None):
        """Compute the loss of each sample."""
        if not self._is_initialized:
            raise RuntimeError("the head has no weights: call initialize or load_class_weights")
        labels = self._check_labels(labels)
        norm = self._check_embeddings(embeddings, labels)
        is_training = autograd.is_recording()
        with autograd.pause():
            step = self._make_step(embeddings.detach(), labels, is_training)
        z_y, n = step.record(embeddings)
        inter_weight = None
        if self.mean_over_rows:
            inter_weight = 1 / step.share_with_negatives()
        arguments = self.criterion.arguments(Batch(self.step, norm, inter_weight, is_training))
        loss = self.criterion(z_y, n, sample_weight, *arguments)
        with autograd.pause():
            arguments = [argument.detach() for argument in arguments]
            intra, inter = self.criterion.parts(nd, z_y.detach(), n.detach(), *arguments)
        self._last = step, {"intra": intra, "inter": inter}
        if is_training:
            self.step += 1
        return loss

    def _make_step(self, embeddings: nd.NDArray, labels: np.ndarray, is_training: bool) -> Step:
        if is_training:
            self._supersede()
        workspaces, self._idle_workspaces = self._idle_workspaces, None
        if workspaces is None:
            workspaces = [Workspace(shard.device) for shard in self.store.shards]
        draw = self.sampler.draw(self.step, labels, embeddings)
        inputs = StepInputs(
            labels, draw, self.criterion.scale, self.normalize, self.chunk, is_training
        )
        step = Step(self.store, inputs, embeddings, workspaces)
        if is_training:
            self._pending = step
        else:
            self._retire(step)
        return step

    def _retire(self, step: Step) -> None:
        """Take a step's memory back: nobody will ask for its gradients."""
        self._idle_workspaces = step.workspaces
        step.release()

    def _supersede(self) -> None:
        """Let a new batch take the last one's place, as a new gradient overwrites an old one."""
        if self._pending is not None:
            self._retire(self._pending)
            self._superseded.append(self._pending)
            self._pending = None
        waiting = [step for step in self._superseded if not step.went_backward]
        self._superseded = waiting[-SUPERSEDED_STEPS:]

    def take_gradients(self) -> Iterator[tuple[int, slice | np.ndarray, RowGradient]]:
        """Hand out, once, the gradients to the class weights of the batch that went backward.

        Returns
        -------
        iterator of (shard, class_rows, gradient)
            As of `Step.weight_gradients`. Until it is exhausted it owns the step's memory.
        """
        steps = [*self._superseded, *([self._pending] if self._pending else [])]
        backward = [step for step in steps if step.went_backward]
        if not backward:
            raise StaleGradientError(
                "there is no new gradient since the last step: call the head under autograd.record "
                "and backward on its loss first"
            )
        step, self._pending, self._superseded = self._pending, None, []
        if len(backward) > 1 or backward[0] is not step:
            self._retire(step)
            found = (
                f"{len(backward)} batches went backward at once"
                if len(backward) > 1
                else "the batch that went backward is not the last one"
            )
            raise RuntimeError(
                f"{found}, but a head holds the gradients of one: call backward and step for each "
                "batch before the next"
            )
        return self._gradients_of(step)

    def _gradients_of(self, step: Step) -> Iterator[tuple[int, slice | np.ndarray, RowGradient]]:
        try:
            yield from step.weight_gradients()
        finally:
            self._retire(step)

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
        # In the graph, for criteria that depend on it; a row of zeros has no gradient.
        norm = nd.sqrt(nd.maximum(row_sum(nd.square(embeddings)), SMALLEST_NORM**2)).reshape(-1)
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
        ``intra``), ``inter_floor`` (the inter loss if all negatives were orthogonal, for criteria
        whose inter loss depends on the negatives alone), ``accuracy`` (the share of samples nearer
        to their own class than to any negative), the mean ``positive_cosine``, the mean
        ``negative_cosine`` and the ``max_negative_cosine``, ``rows_touched`` (class weights read
        and, in training, updated), and what the sampler has to tell.
        """
        if self._last is None:
            return {}
        step, parts = self._last
        found = {name: float(part.mean().asscalar()) for name, part in parts.items()}
        floor = self.criterion.inter_floor(step.orthogonal_n())
        if floor is not None:
            # Samples without negatives have no inter loss.
            weight = 1.0 if self.mean_over_rows else step.share_with_negatives()
            found["inter_floor"] = weight * floor
        return {**found, **step.stats(), **self.sampler.stats}

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
