"""One step of a head: z_y and n of a batch, and the gradients to embeddings and class weights.

z_y and n are one number per sample each, so their gradients to the embedding are one vector per
sample each, which the forward pass computes. MXNet then only records two row-wise products with
constant vectors, and two arrays of zeros that receive the gradients to z_y and n during
``backward``. The gradients to the class weights follow from those when the trainer asks for them,
block by block.
"""

from __future__ import annotations

from typing import Callable, Iterator, NamedTuple, Optional

import numpy as np
from mxnet import nd

from dsoftmax.losses.kernels import (
    NOTHING,
    RowGradient,
    Workspace,
    add_rows,
    from_numpy,
    inverse_norm,
    project,
    row_sum,
    scale_rows,
    take_rows,
)
from dsoftmax.losses.negatives import BlockwiseNegatives, NegativeSums, combine_negatives
from dsoftmax.losses.reductions import Reduction
from dsoftmax.losses.samplers import Draw
from dsoftmax.losses.stores.base import ClassStore, Shard
from dsoftmax.recognition.common.products import times


class StepInputs(NamedTuple):
    """The description of a step, the same for every shard."""

    labels: np.ndarray  # (B,) int64
    draw: Draw
    scale: float
    normalize: bool  # cosines, or plain inner products
    chunk: int | None  # classes per product; None to keep the logits of all
    for_training: bool
    # Whether logits may be kept for the gradients to the class weights, or are computed again.
    keeps_logits: bool = True
    # Whether n depends on z_y beside the logits of the negatives.
    follows_target: bool = False
    subcentres: int = 1  # rows of a class, of which the nearest counts

    def count_negatives(self, num_classes: int) -> tuple[int, int]:
        """Count a sample's negatives: those that were drawn, and those that are labels."""
        classes = self.draw.classes
        if classes is None:
            return 0, num_classes - 1
        if not self.draw.labels_are_negatives:
            return len(classes), 0
        return len(classes), len(np.unique(self.labels)) - 1

    def rows_of(self, classes: np.ndarray, shard: Shard) -> np.ndarray:
        """Return the rows of those of some classes that lie in a shard, counted from its first."""
        first = classes * self.subcentres
        first = first[shard.owned(first)] - shard.start
        return (first[:, None] + np.arange(self.subcentres)).reshape(-1)

    def of_part(self, start: int, stop: int) -> StepInputs:
        """Return the description of the samples from `start` to `stop` alone."""
        draw = self.draw.of_part(start, stop)
        return self._replace(labels=self.labels[start:stop], draw=draw)


ReductionMaker = Callable[[Optional[nd.NDArray]], Reduction]


class ShardRows:
    """The class rows of one shard that an update uses, with their weights.

    Parameters
    ----------
    shard : Shard
    width : int
        D.
    inputs : StepInputs
        Of all samples of the update.
    workspace : Workspace
        On the shard's device.

    Attributes
    ----------
    labels : (labels,) int64
        The rows of those of the samples' labels that lie in the shard, sorted, counted from its
        first.
    class_rows : (rows,) int64 or None
        The rows of the classes, counted likewise; None for all of the shard.
    weight : (rows, D)
        There is none without rows.
    columns : int
        So many of the rows, the first ones, are negatives.
    label_rows : (labels,) int64
        Where the rows of `labels` are.
    inverses : dict of int to (classes, 1)
        1 / length of the rows, for each block of them that `BlockwiseNegatives` has used.
    """

    def __init__(self, shard: Shard, width: int, inputs: StepInputs, workspace: Workspace):
        self.shard = shard
        self.inverses: dict[int, nd.NDArray] = {}
        draw = inputs.draw
        self.labels = inputs.rows_of(np.unique(inputs.labels), shard)
        if draw.classes is None:
            self.class_rows = None
            self.weight = shard.weight
            self.label_rows = self.labels
            self.row_count = self.columns = len(shard)
            return
        others = inputs.rows_of(draw.classes, shard)
        # Labels come last: their rows are one slice, whether they are negatives or not.
        self.class_rows = np.concatenate([others, self.labels])
        self.row_count = len(self.class_rows)
        self.label_rows = len(others) + np.arange(len(self.labels))
        self.columns = self.row_count if draw.labels_are_negatives else len(others)
        if self.row_count:
            self.weight = workspace.get("rows", self.row_count, width)
            shard.gather(self.class_rows, self.weight)


class ShardStep:
    """One shard's part of a step: its negatives, and the samples whose class it holds.

    Parameters
    ----------
    rows : ShardRows
        Of an update that this step is a part of.
    inputs : StepInputs
    unit : (B, D)
        The embeddings on the shard's device, normalised for cosines.
    workspace : Workspace
        On the shard's device.
    """

    def __init__(self, rows: ShardRows, inputs: StepInputs, unit: nd.NDArray, workspace: Workspace):
        self.shard = rows.shard
        self.unit = unit
        self._rows = rows
        self._inputs = inputs
        self._workspace = workspace
        first = inputs.labels * inputs.subcentres
        self.samples = np.flatnonzero(self.shard.owned(first))
        # The first row of each sample's class among `rows.labels`, and all pairs of a sample and
        # such a row.
        self._label_of_sample = np.searchsorted(rows.labels, first[self.samples] - self.shard.start)
        centres = np.arange(inputs.subcentres)
        self._row_of_pair = (self._label_of_sample[:, None] + centres).reshape(-1)
        self._sample_of_pair = np.repeat(self.samples, inputs.subcentres)
        self._targets: tuple[nd.NDArray, ...] | None = None
        self._is_nearest: nd.NDArray | None = None  # (samples, centres), if there are several
        self._negatives: BlockwiseNegatives | None = None

    def reduce_by(self, reduction: Reduction) -> None:
        """Say how n is made of the logits of the negatives, if the shard has any in this step."""
        labels, draw, scale = self._inputs[:3]
        rows = self._rows
        if not rows.columns or draw.is_empty:
            return
        target_column = np.full(len(labels), -1, np.int64)
        if draw.labels_are_negatives:
            target_column[self.samples] = rows.label_rows[self._label_of_sample]
        unit = self.unit
        if draw.samples is not None:
            target_column, unit = target_column[draw.samples], take_rows(unit, draw.samples)
            reduction = reduction.take(draw.samples)
        offset = None
        if draw.correction:
            offset = np.zeros((1, rows.columns // self._inputs.subcentres), np.float32)
            drawn = rows.row_count - len(rows.labels)
            offset[:, : drawn // self._inputs.subcentres] = draw.correction
            offset = from_numpy(offset, self.shard.device, "float32")
        self._negatives = BlockwiseNegatives(
            scale * unit,
            rows.weight[: rows.columns],
            rows.inverses,
            target_column,
            offset,
            reduction.bind(scale, len(unit), self.shard.device),
            self._inputs,
            self._workspace,
        )

    def negatives(self) -> NegativeSums | None:
        """Return the sums over the shard's negatives; None if it has none in this step."""
        return self._negatives.forward() if self._negatives else None

    def targets(self) -> tuple[nd.NDArray, nd.NDArray]:
        """Compute the cosines of the samples whose class is in the shard.

        Returns
        -------
        cosine : (samples,)
        direction : (samples, D)
            The gradient of the cosine to the normalised embedding.
        """
        unit, direction, inverse = self._take_targets()
        if inverse is not None:
            direction = scale_rows(direction, inverse)
        cosine = row_sum(unit * direction).reshape(-1)
        centres = self._inputs.subcentres
        if centres == 1:
            return cosine, direction
        by_sample = cosine.reshape((-1, centres))
        nearest = by_sample.argmax(axis=1)
        self._is_nearest = nd.one_hot(nearest, centres)
        pair = nearest + from_numpy(
            centres * np.arange(len(self.samples)), nearest.context, "float32"
        )
        count, width = direction.shape
        direction = nd.Embedding(pair, direction, input_dim=count, output_dim=width)
        return by_sample.max(axis=1), direction

    def _take_targets(self) -> tuple[nd.NDArray, nd.NDArray, nd.NDArray | None]:
        """Return embeddings, weights and 1 / the weights' lengths of the pairs in the shard."""
        if self._targets is None:
            rows = self._rows.label_rows[self._row_of_pair]
            weight = take_rows(self._rows.weight, rows)
            inverse = inverse_norm(weight) if self._inputs.normalize else None
            self._targets = take_rows(self.unit, self._sample_of_pair), weight, inverse
        return self._targets

    def weight_gradients(
        self, grad_z_y: nd.NDArray, grad_n: nd.NDArray, n: nd.NDArray
    ) -> Iterator[tuple[slice | np.ndarray, RowGradient]]:
        """Make the gradient to the shard's class weights, block by block.

        Parameters
        ----------
        grad_z_y : (B,)
            The gradient to z_y; on the shard's device, like the others.
        grad_n : (samples with negatives,)
            The gradient to n.
        n : (samples with negatives,)
            n over all shards.

        Yields
        ------
        class_rows : slice or (classes,) int64
            Counted from the shard's first class.
        gradient : RowGradient
            The next block reuses its memory.
        """
        rows = self._rows
        targets = self._target_gradient(grad_z_y) if len(self.samples) else None
        if self._negatives:
            for number, block in enumerate(self._negatives.blocks):
                gradient = self._negatives.weight_gradient(number, grad_n, n)
                inside = np.flatnonzero(
                    (rows.label_rows >= block.start) & (rows.label_rows < block.stop)
                )
                if len(inside):
                    add_rows(
                        gradient.values,
                        rows.label_rows[inside] - block.start,
                        take_rows(targets, inside),
                    )
                yield block if rows.class_rows is None else rows.class_rows[block], gradient
        if rows.columns < rows.row_count:  # the labels are no negatives
            yield rows.labels, RowGradient(targets)

    def _target_gradient(self, grad_z_y: nd.NDArray) -> nd.NDArray:
        """Return the gradient of z_y to the weights of the labels, (labels, D)."""
        device = self.shard.device
        unit, weight, inverse = self._take_targets()
        grad_pair = nd.take(grad_z_y, from_numpy(self._sample_of_pair, device))
        if self._inputs.subcentres > 1:
            if self._is_nearest is None:
                self.targets()
            grad_pair = grad_pair * self._is_nearest.reshape(-1)
        grad_weight = scale_rows(unit, grad_pair)
        if inverse is not None:
            grad_weight = project(grad_weight, weight, inverse)
        # A product with 0s and 1s adds up the samples of each class.
        belongs = np.arange(len(self._rows.labels))[:, None] == self._row_of_pair
        out = nd.empty((len(self._rows.labels), grad_weight.shape[1]), ctx=device)
        times(from_numpy(belongs, device, "float32"), grad_weight, out)
        return out


class Step:
    """z_y and n of one batch over all shards, and their gradients.

    The values are computed when the step is made. `record` puts them into MXNet's graph; after
    ``backward`` has passed through them (`went_backward`), `received` are the gradients to them.
    Made by an `Update`, which lends it the memory.

    Parameters
    ----------
    store : ClassStore
    inputs : StepInputs
    embeddings : (B, D)
    rows : list of ShardRows
        One per shard, of the update.
    workspaces : list of Workspace
        One per shard.
    make_reduction : function
        Called with z_y, (B,), or with None unless the inputs say that n follows it; returns the
        `Reduction`.

    Attributes
    ----------
    inputs : StepInputs
    reduction : Reduction
        Of the samples.
    shards : list of ShardStep
        Until `release`.
    z_y : (B,)
    negatives : NegativeSums
        Of the samples that have negatives.
    """

    def __init__(
        self,
        store: ClassStore,
        inputs: StepInputs,
        embeddings: nd.NDArray,
        rows: list[ShardRows],
        workspaces: list[Workspace],
        make_reduction: ReductionMaker,
    ):
        self._store = store
        self.inputs = inputs
        self._make_reduction = make_reduction
        self._context = embeddings.context
        self._leaves: tuple[nd.NDArray, nd.NDArray] | None = None
        inverse = inverse_norm(embeddings) if inputs.normalize else None
        unit = scale_rows(embeddings, inverse) if inputs.normalize else embeddings
        self.shards = [
            ShardStep(of_shard, inputs, unit.as_in_context(of_shard.shard.device), workspace)
            for of_shard, workspace in zip(rows, workspaces)
        ]
        self.negatives, self.z_y, directions = self._over_all_processes(unit)
        self._grads: tuple[nd.NDArray, ...] = ()
        if inputs.for_training:
            self._grads = self._grad_embeddings(embeddings, inverse, directions)

    def _over_all_processes(self, unit: nd.NDArray) -> tuple[NegativeSums, nd.NDArray, nd.NDArray]:
        """Return the negatives' sums, z_y (B,) and its gradient to the normalised embeddings."""
        z_y, directions = self._targets(unit)
        group = self._store.group
        self._choose_reduction(z_y)
        negatives = self._over_shards(unit)
        if group.size == 1:
            return negatives, z_y, directions
        ours = negatives.numbers
        numbers = group.gather("log-sum-exps", nd.stack(*ours))
        parts = [NegativeSums(*part) for part in numbers.reshape((group.size, len(ours), -1))]
        whole = combine_negatives(parts, self.reduction)
        vectors = [z_y, directions]
        if self.inputs.for_training:
            share = self.reduction.share(negatives.n, whole.n)
            vectors.append(scale_rows(negatives.grad_embedding, share))
        z_y, directions, *grads = group.sum_arrays("vectors", vectors)
        return whole._replace(grad_embedding=grads[0] if grads else None), z_y, directions

    def _choose_reduction(self, z_y: nd.NDArray) -> None:
        """Ask how n is made; z_y, (B,), is 0 for classes of other processes."""
        followed = None
        if self.inputs.follows_target:
            followed = self._store.group.sum("target cosines", z_y.copy())
            self._store.take_turns()
        reduction = self._make_reduction(followed)
        self._bias = reduction.bias
        self.reduction = reduction.of_samples(len(z_y))
        for shard_step in self.shards:
            shard_step.reduce_by(self.reduction)

    def _over_shards(self, unit: nd.NDArray) -> NegativeSums:
        parts = []
        for shard_step in self.shards:
            part = shard_step.negatives()
            if part is not None:
                parts.append(part.as_in_context(self._context))
                self._store.take_turns()
        if parts:
            return combine_negatives(parts, self.reduction)
        samples = self.inputs.draw.samples
        count = len(unit) if samples is None else len(samples)
        n = nd.full((count,), self.reduction.nothing, ctx=self._context)
        zero, no_logit = nd.zeros_like(n), nd.full((count,), NOTHING, ctx=self._context)
        mass = None if self._bias is None else zero
        no_gradient = nd.zeros((count, unit.shape[1]), ctx=self._context)
        return NegativeSums(n, zero, no_logit, mass, no_gradient)

    def _targets(self, unit: nd.NDArray) -> tuple[nd.NDArray, nd.NDArray]:
        """Return z_y, (B,), and its gradient, (B, D); 0 for classes of other processes."""
        owners = [shard_step for shard_step in self.shards if len(shard_step.samples)]
        parts = [
            [value.as_in_context(self._context) for value in shard_step.targets()]
            for shard_step in owners
        ]
        batch = len(self.inputs.labels)
        if not parts:
            return nd.zeros((batch,), ctx=self._context), nd.zeros_like(unit)
        if len(parts) == 1 and len(owners[0].samples) == batch:
            return tuple(parts[0])
        cosine, direction = (nd.concat(*values, dim=0) for values in zip(*parts))
        samples = np.concatenate([shard_step.samples for shard_step in owners])
        if len(samples) == batch:
            order = np.argsort(samples)
            return nd.take(cosine, self._index(order)), take_rows(direction, order)
        index = self._index(samples).reshape((1, -1))
        return (
            nd.scatter_nd(cosine, index, shape=(batch,)),
            nd.scatter_nd(direction, index, shape=unit.shape),
        )

    def _grad_embeddings(
        self, embeddings: nd.NDArray, inverse: nd.NDArray | None, directions: nd.NDArray
    ) -> tuple[nd.NDArray, nd.NDArray]:
        """Return the gradients of z_y and of n to the embeddings, (B, D) each."""
        of_n = self.inputs.scale * self.negatives.grad_embedding
        samples = self.inputs.draw.samples
        if samples is not None:
            index = self._index(samples).reshape((1, -1))
            of_n = nd.scatter_nd(of_n, index, shape=embeddings.shape)
        if inverse is None:
            return directions, of_n
        return tuple(project(grad, embeddings, inverse) for grad in (directions, of_n))

    def record(self, embeddings: nd.NDArray) -> tuple[nd.NDArray, nd.NDArray]:
        """Return z_y and n, (B,) each, as functions of the embeddings in the graph MXNet records.

        A sample without negatives has an n of -1e30, or 0 if n is a plain sum.
        """
        values = (self.z_y, self.n_of_all_samples())
        if not self.inputs.for_training:
            return values
        self._leaves = tuple(nd.zeros_like(value) for value in values)
        outputs = []
        for value, leaf, grad in zip(values, self._leaves, self._grads):
            leaf.attach_grad()
            linear = row_sum(embeddings * grad).reshape(-1)
            outputs.append(value + (linear - linear.detach()) + leaf)
        z_y, n = outputs
        if self._bias is not None:
            linear = nd.broadcast_mul(self._of_all_samples(self.negatives.mass, 0.0), self._bias)
            n = n - (linear - linear.detach())
        return z_y, n

    def n_of_all_samples(self) -> nd.NDArray:
        """Return n, (B,), also of samples without negatives."""
        return self._of_all_samples(self.negatives.n, self.reduction.nothing)

    def _of_all_samples(self, values: nd.NDArray, missing: float) -> nd.NDArray:
        """Return a number per sample, (B,), from those of the samples that have negatives."""
        samples = self.inputs.draw.samples
        if samples is None:
            return values
        others = np.full(len(self.inputs.labels), missing, np.float32)
        others[samples] = 0
        index = self._index(samples).reshape((1, -1))
        values = nd.scatter_nd(values, index, shape=others.shape)
        return values + from_numpy(others, self._context, "float32")

    @property
    def went_backward(self) -> bool:
        """Whether ``backward`` has passed through what `record` returned."""
        return self._leaves is not None and any(leaf._fresh_grad for leaf in self._leaves)

    def received(self) -> tuple[nd.NDArray, nd.NDArray]:
        """Return the gradients to z_y and n, (B,) each, that ``backward`` has left."""
        return tuple(leaf.grad for leaf in self._leaves)

    def release(self) -> None:
        """Give up the class rows and what was computed with them."""
        self.shards = []

    def _index(self, positions: np.ndarray) -> nd.NDArray:
        return from_numpy(positions, self._context)
