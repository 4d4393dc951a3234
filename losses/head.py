"""The head: class weights, the choice of negatives and a criterion, as one Gluon block."""

from __future__ import annotations

import functools
from typing import Iterator

import mxnet as mx
import numpy as np
from mxnet import autograd, nd
from mxnet.gluon import Block

from dsoftmax.losses.criteria import BatchContext, Criterion
from dsoftmax.losses.kernels import SMALLEST_NORM, RowGradient, row_sum
from dsoftmax.losses.reductions import Reduction
from dsoftmax.losses.samplers import Sampler
from dsoftmax.losses.step import StepInputs
from dsoftmax.losses.stores.base import ClassStore
from dsoftmax.losses.trainer import HeadTrainer
from dsoftmax.losses.update import Updates, check_lengths
from dsoftmax.recognition.common.arrays import load_arrays, save_arrays
from dsoftmax.recognition.common.rows import finite_blocks

CLASS_WEIGHT = "class_weight"  # the name in files of `save_parameters`
LARGEST_ARRAY = (1 << 31) - 1  # elements of an array in MXNet's files
CHECKED_AT_ONCE = 1 << 16  # classes


class Head(Block):
    """The loss of a batch of embeddings against the weights of all classes.

    Made by `dsoftmax.losses.create`.

    Parameters
    ----------
    criterion : Criterion
        Makes a loss of (z_y, n).
    sampler : Sampler
        Chooses the negatives of n.
    store : ClassStore
        Holds the class weights. If several processes share them, each must be given the embeddings
        and labels of the whole batch, and returns its whole loss.
    normalize : bool
        Cosines, or plain inner products.
    chunk : int, optional
        Classes per product when n is computed, to save memory.
    seed : int
        Of the weights' initialization.
    inter_filter : float, optional
        A cosine above which a negative is taken for another image of the sample's own person under
        a wrong label: its cosine counts as 0 and has no gradient. Partial FC has 0.4.

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
        sampler: Sampler,
        store: ClassStore,
        normalize: bool = True,
        chunk: int | None = None,
        seed: int = 0,
        inter_filter: float | None = None,
    ):
        super().__init__()
        if not isinstance(inter_filter, (int, float, type(None))):
            raise ValueError(f"inter_filter must be a cosine like 0.4, not {inter_filter!r}")
        self.criterion = criterion
        self.sampler = sampler
        self.store = store
        self.normalize = normalize
        self.chunk = chunk
        self.seed = seed
        self.inter_filter = inter_filter
        # Training batches so far, or announced updates: draws are a function of (seed, step).
        self.step = 0
        self._is_initialized = False
        self._forget_batches()

    def _forget_batches(self) -> None:
        """Drop everything that belongs to batches seen so far, but for their number."""
        self._updates = Updates(self.store)

    def __getstate__(self) -> dict:
        copied = Head.__new__(Head)
        copied.__dict__.update(self.__dict__)
        copied._forget_batches()
        return copied.__dict__

    @property
    def num_classes(self) -> int:
        """K."""
        return self.store.num_classes

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
        self._forget_batches()
        self.store.initialize(initializer or mx.init.Normal(0.01), self.seed)
        self._is_initialized = True

    def trainer(self, optimizer="sgd", optimizer_params: dict | None = None) -> HeadTrainer:
        """Make the trainer of the class weights, with the methods of a ``gluon.Trainer``."""
        return self.store.make_trainer(self, optimizer, optimizer_params or {})

    def class_weights(self) -> np.ndarray:
        """Return all class weights, numpy (K, D), however they are split.

        With several centres per class they are (K × centres, D), those of a class neighbours.
        """
        return self.store.read()

    def load_class_weights(self, array) -> None:
        """Set all class weights from an array (K, D); gradients of the old ones are dropped.

        All processes must call it; the first one's array counts, the others may give None.
        """
        if self.store.group.is_first:
            array = array.asnumpy() if isinstance(array, nd.NDArray) else np.asarray(array)
            if array.shape != self.store.shape:
                raise ValueError(
                    f"the head has class weights of shape {self.store.shape}, not {array.shape}"
                )
            for _ in finite_blocks(_blocks_of(array), "class weight"):
                pass
        self._forget_batches()
        self.store.fill(array)
        self._is_initialized = True

    def save_parameters(self, filename, deduplicate: bool = False) -> None:
        """Save all class weights, (K, D) however they are split, as one array ``class_weight``.

        All processes must call it; the first writes the file.
        """
        rows, width = self.store.shape
        if rows * width > LARGEST_ARRAY:
            raise ValueError(
                f"{rows} x {width} class weights are more than an MXNet "
                "array holds: save class_weights() with numpy"
            )
        weights = self.class_weights()
        if self.store.group.is_first:
            save_arrays(filename, {CLASS_WEIGHT: weights})

    def load_parameters(self, filename, *_, **__) -> None:
        """Load what `save_parameters` saved, on any number of devices.

        All processes must call it; the first reads the file.
        """
        weights = None
        if self.store.group.is_first:
            saved = load_arrays(filename)
            if set(saved) != {CLASS_WEIGHT}:
                raise ValueError(f"{filename}: not the parameters of a head, {CLASS_WEIGHT} alone")
            weights = saved[CLASS_WEIGHT]
        self.load_class_weights(weights)

    def _collect_params_with_prefix(self, prefix: str = "") -> dict:
        """Refuse to be saved as a part of another block: the class weights would be missing."""
        raise ValueError(
            "class weights are no gluon.Parameters, so a file of the block around this head would "
            "lack them: call save_parameters and load_parameters on the head and on the network "
            "separately"
        )

    def begin_update(self, labels) -> None:
        """Announce the batches of the next update, and fetch the class rows they use.

        Call the head and ``backward`` for each of them, then the trainer's ``step``, once. The
        update is that of one batch with the samples of all of these *micro-batches*: negatives are
        drawn once, for all labels together. With a single batch nothing is computed differently;
        announced before the network runs, its class rows come while the network computes.

        Until the step, any other training batch and another update are refused; evaluations are
        not. `drop_update` gives the update up.

        Parameters
        ----------
        labels : list of (B,) integers
            Those of each micro-batch, in the order in which they will be given to the head.

        Examples
        --------
        >>> head.begin_update([labels[:4], labels[4:]])
        >>> for part in (slice(0, 4), slice(4, 8)):
        ...     with autograd.record():
        ...         loss = head(network(images[part]), labels[part])
        ...     loss.backward()
        >>> trainer.step(8)
        """
        self._check_initialized()
        if self.sampler.needs_embeddings:
            raise ValueError(
                "an update can't be announced: its negatives depend on all of its embeddings "
                f"({self.sampler!r}); choose other negatives or larger batches"
            )
        parts = [self._check_labels(part) for part in labels]
        if not parts or any(part.ndim != 1 or not len(part) for part in parts):
            raise ValueError("begin_update needs a list with the labels, (B,), of each micro-batch")
        with autograd.pause():
            inputs = self._describe_step(np.concatenate(parts), None, for_training=True)
            self._updates.begin(inputs, [len(part) for part in parts])

    def drop_update(self) -> None:
        """Give up the update that `begin_update` began, if any, and what its batches computed."""
        self._updates.drop()

    def _describe_step(self, labels: np.ndarray, embeddings, for_training: bool) -> StepInputs:
        """Draw the negatives of a step."""
        draw = self.sampler.draw(self.step, labels, embeddings)
        inputs = StepInputs(
            labels,
            draw,
            self.criterion.scale,
            self.normalize,
            self.chunk,
            for_training,
            follows_target=self.criterion.follows_target,
            subcentres=self.store.subcentres,
        )
        self.criterion.prepare(sum(inputs.count_negatives(self.num_classes)))
        return inputs

    def _check_initialized(self) -> None:
        if not self._is_initialized:
            raise RuntimeError("the head has no weights: call initialize or load_class_weights")

    def forward(self, embeddings, labels, sample_weight=None):
        """Compute the loss of each sample."""
        self._check_initialized()
        _refuse_lists(embeddings, labels)
        labels = self._check_labels(labels)
        self._check_embeddings(embeddings, labels)
        # In the graph, for criteria that depend on it; a row of zeros has no gradient.
        norm = nd.sqrt(nd.maximum(row_sum(nd.square(embeddings)), SMALLEST_NORM**2)).reshape(-1)
        is_training = autograd.is_recording()
        if not is_training or self.sampler.needs_embeddings:
            check_lengths(norm.asnumpy())  # in training it is done later, see `read_loss`
        is_announced = is_training and self._updates.awaits_batches
        with autograd.pause():
            if not is_announced:
                inputs = self._describe_step(labels, embeddings.detach(), is_training)
            learned = self._learned_numbers(norm.context, is_training)
            batch = BatchContext(self.step, norm, is_training=is_training, learned=learned)
            make_reduction = functools.partial(self._make_reduction, batch)
            if is_announced:
                step = self._updates.run_announced(labels, embeddings.detach(), make_reduction)
            else:
                step = self._updates.run(inputs, embeddings.detach(), make_reduction)
        z_y, n = step.record(embeddings)
        batch = batch._replace(inter_weight=step.inputs.draw.inter_weight, z_y=step.z_y)
        arguments = self.criterion.arguments(batch)
        loss = self.criterion(z_y, n, sample_weight, *arguments)
        with autograd.pause():
            arguments = [argument.detach() for argument in arguments]
            parts = self.criterion.parts(nd, z_y.detach(), n.detach(), *arguments)
            self._updates.latest.watch(loss, norm, learned)
        for name, part in zip(("intra", "inter"), parts):
            self._updates.latest.loss_parts[name].append(part)
        if is_training and not self._updates.awaits_batches:
            self.step += 1
        return loss

    def _make_reduction(self, batch: BatchContext, z_y: nd.NDArray | None) -> Reduction:
        """Ask the criterion how n is made; z_y, (B,), is None unless the criterion follows it."""
        with autograd.record() if batch.is_training else autograd.pause():
            reduction = self.criterion.reduction(batch._replace(z_y=z_y))
        return reduction if self.inter_filter is None else reduction.filtered(self.inter_filter)

    def _learned_numbers(self, context: mx.Context, is_training: bool) -> dict[str, nd.NDArray]:
        """Return copies of the criterion's learned numbers, (1,) each, that receive gradients."""
        copies = {}
        for name in self.criterion.learned:
            copies[name] = self.criterion.number(name, context).astype("float32")
            if is_training:
                copies[name].attach_grad()
        return copies

    def read_loss(self) -> float:
        """Return the mean loss of the last batch, or of the micro-batches of the last update.

        This is where a training step waits for the device: call it when ``backward`` is queued, and
        before the network is updated. The trainer's ``step`` then does not wait again.

        Raises
        ------
        ValueError
            A loss or an embedding is not finite.
        """
        if self._updates.latest is None:
            raise RuntimeError("there is no loss yet: call the head on a batch first")
        return self._updates.latest.read_loss()

    def take_gradients(self) -> Iterator[tuple[int, slice | np.ndarray, RowGradient]]:
        """Hand out, once, the gradients to the class weights of the last batch or update.

        Returns
        -------
        iterator of (shard, class_rows, gradient)
            As in `Update.weight_gradients`.
        """
        return self._updates.take_gradients()

    def learned_gradients(self) -> dict[str, nd.NDArray]:
        """Return the gradients to the criterion's learned numbers, (1,) each by name.

        They are those of the update whose gradients to the class weights were taken last.
        """
        return self._updates.learned_gradients

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

    def _check_embeddings(self, embeddings, labels: np.ndarray) -> None:
        """Refuse embeddings of another shape or type."""
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

    @property
    def stats(self) -> dict[str, float]:
        """Figures of the last batch, or of the micro-batches of the last update.

        ``intra`` and ``inter`` loss (the whole loss is ``intra`` if the criterion is not
        dissected), ``inter_floor`` (the inter loss if all negatives were orthogonal, for criteria
        whose inter loss depends on the negatives alone), ``accuracy`` (the share of samples nearer
        to their own class than to any negative), the mean ``positive_cosine``, the mean
        ``negative_cosine`` and the ``max_negative_cosine``, ``negatives`` (how many a sample of
        the batch had, if it had any), ``rows_touched`` (class rows read and, in training, updated),
        and what the sampler reports.
        """
        if self._updates.latest is None:
            return {}
        figures = self._updates.latest.figures()
        stats = figures.stats()
        floor = self.criterion.inter_floor(figures.orthogonal_n())
        if floor is not None:
            stats["inter_floor"] = figures.inter_share() * floor
        return {**stats, **self.sampler.stats}

    def __repr__(self) -> str:
        below = "" if self.inter_filter is None else f" below a cosine of {self.inter_filter:g}"
        if self.store.subcentres > 1:
            below += f", the nearest of {self.store.subcentres} centres per class"
        chunk = f", {self.chunk} classes at a time" if self.chunk else ""
        return (
            f"Head({self.embedding_size} -> {self.num_classes}: {self.criterion!r} against "
            f"{self.sampler!r}{below}{chunk}; on {self.store.describe()})"
        )


def _refuse_lists(embeddings, labels) -> None:
    """Refuse one array per device, as Gluon users have who split batches over devices."""
    for name, value in (("embeddings", embeddings), ("labels", labels)):
        # A list of numbers is one array; a scalar of numpy has the shape ().
        if isinstance(value, (list, tuple)) and any(getattr(part, "shape", ()) for part in value):
            raise TypeError(
                f"{name} must be one array for the whole batch, not a {type(value).__name__} of "
                f"{len(value)}: join those of several devices by "
                "nd.concat(*(e.as_in_context(embeddings[0].context) for e in embeddings), dim=0), "
                "and the labels likewise"
            )


def _blocks_of(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows of an array that may be too large for a copy."""
    for start in range(0, len(array), CHECKED_AT_ONCE):
        yield array[start : start + CHECKED_AT_ONCE]
