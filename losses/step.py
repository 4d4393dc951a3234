"""One step of a head: z_y and n of a batch, and the gradients to embeddings and class weights.

z_y and n are one number per sample each, so their gradients to the embedding are one vector per
sample each, which the forward pass computes. MXNet then only records two row-wise products with
constant vectors, and two arrays of zeros that receive the gradients to z_y and n during
``backward``. The gradients to the class weights follow from those when the trainer asks for them,
block by block.
"""

from __future__ import annotations

import math
from typing import Iterator, NamedTuple

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
from dsoftmax.losses.log_sum_exp import BlockwiseLogSumExp, NegativeSums, combine_negatives
from dsoftmax.losses.products import times
from dsoftmax.losses.samplers import Draw
from dsoftmax.losses.stores.base import ClassStore, Shard

SUPERSEDED_STEPS = 4  # that are watched for a backward pass that comes too late


class StaleGradientError(RuntimeError):
    """There was no backward pass since the last update."""


class StepInputs(NamedTuple):
    """The description of a step, the same for every shard."""

    labels: np.ndarray  # (B,) int64
    draw: Draw
    scale: float
    normalize: bool  # cosines, or plain inner products
    chunk: int | None  # classes per product; None to keep the logits of all
    for_training: bool


class ShardStep:
    """One shard's part of a step: its negatives, and the samples whose class it holds.

    Parameters
    ----------
    shard : Shard
    inputs : StepInputs
    unit : (B, D)
        The embeddings on the shard's device, normalised for cosines.
    workspace : Workspace
        On the shard's device.
    """

    def __init__(self, shard: Shard, inputs: StepInputs, unit: nd.NDArray, workspace: Workspace):
        self.shard = shard
        self._inputs = inputs
        self._unit = unit
        self._workspace = workspace
        self.samples = np.flatnonzero(shard.owned(inputs.labels))
        owned = inputs.labels[self.samples] - shard.start
        self._labels, self._label_of_sample = np.unique(owned, return_inverse=True)
        self._choose_class_rows()
        self._log_sum_exp = self._make_log_sum_exp() if self._columns else None

    def _choose_class_rows(self) -> None:
        """Choose the class rows that the step uses, and gather their weights.

        The first `_columns` of them are negatives. `_class_rows` is None if all rows are used.
        """
        draw = self._inputs.draw
        if draw.classes is None:
            self._class_rows = None
            self._weight = self.shard.weight
            self._label_rows = self._labels
            self._row_count = self._columns = len(self.shard)
            return
        others = draw.classes[self.shard.owned(draw.classes)] - self.shard.start
        # Labels come last: their rows are one slice, whether they are negatives or not.
        self._class_rows = np.concatenate([others, self._labels])
        self._row_count = len(self._class_rows)
        self._label_rows = len(others) + np.arange(len(self._labels))
        self._columns = self._row_count if draw.labels_are_negatives else len(others)
        if self._row_count:
            self._weight = self._workspace.get("rows", self._row_count, self._unit.shape[1])
            self.shard.gather(self._class_rows, self._weight)

    def _make_log_sum_exp(self) -> BlockwiseLogSumExp:
        labels, draw, scale = self._inputs[:3]
        target_column = np.full(len(labels), -1, np.int64)
        if draw.labels_are_negatives:
            target_column[self.samples] = self._label_rows[self._label_of_sample]
        unit = self._unit
        if draw.samples is not None:
            target_column, unit = target_column[draw.samples], take_rows(unit, draw.samples)
        offset = None
        if draw.correction:
            offset = np.zeros((1, self._columns), np.float32)
            offset[:, : len(self._class_rows) - len(self._labels)] = draw.correction
            offset = from_numpy(offset, self.shard.device, "float32")
        weight = self._weight[: self._columns]
        return BlockwiseLogSumExp(
            scale * unit, weight, target_column, offset, self._inputs, self._workspace
        )

    def negatives(self) -> NegativeSums | None:
        """Return the sums over the shard's negatives; None if it has none in this step."""
        return self._log_sum_exp.forward() if self._log_sum_exp else None

    def targets(self) -> tuple[nd.NDArray, nd.NDArray]:
        """Compute the cosines of the samples whose class is in the shard.

        Returns
        -------
        cosine : (samples,)
        direction : (samples, D)
            The gradient of the cosine to the normalised embedding.
        """
        self._target_unit = take_rows(self._unit, self.samples)
        self._target_weight = take_rows(self._weight, self._label_rows[self._label_of_sample])
        direction = self._target_weight
        if self._inputs.normalize:
            self._target_inverse = inverse_norm(self._target_weight)
            direction = scale_rows(direction, self._target_inverse)
        return row_sum(self._target_unit * direction).reshape(-1), direction

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
        targets = self._target_gradient(grad_z_y) if len(self.samples) else None
        if self._log_sum_exp:
            for number, block in enumerate(self._log_sum_exp.blocks):
                gradient = self._log_sum_exp.weight_gradient(number, grad_n, n)
                inside = np.flatnonzero(
                    (self._label_rows >= block.start) & (self._label_rows < block.stop)
                )
                if len(inside):
                    add_rows(
                        gradient.values,
                        self._label_rows[inside] - block.start,
                        take_rows(targets, inside),
                    )
                yield block if self._class_rows is None else self._class_rows[block], gradient
        if self._columns < self._row_count:  # the labels are no negatives
            yield self._labels, RowGradient(targets)

    def _target_gradient(self, grad_z_y: nd.NDArray) -> nd.NDArray:
        """Return the gradient of z_y to the weights of `_labels`, (labels, D)."""
        device = self.shard.device
        samples = from_numpy(self.samples, device)
        grad_weight = scale_rows(self._target_unit, nd.take(grad_z_y, samples))
        if self._inputs.normalize:
            grad_weight = project(grad_weight, self._target_weight, self._target_inverse)
        # A product with 0s and 1s adds up the samples of each class.
        belongs = np.arange(len(self._labels))[:, None] == self._label_of_sample
        out = nd.empty((len(self._labels), grad_weight.shape[1]), ctx=device)
        times(from_numpy(belongs, device, "float32"), grad_weight, out)
        return out


class Step:
    """z_y and n of one batch over all shards, and their gradients.

    The values are computed when the step is made. `record` puts them into MXNet's graph; once
    ``backward`` has passed through them (`went_backward`), `weight_gradients` makes the gradients
    to the class weights. Made by `Steps`, which lends it the memory.

    Parameters
    ----------
    store : ClassStore
    inputs : StepInputs
    embeddings : (B, D)
    workspaces : list of Workspace
        One per shard, lent until `release`.
    """

    def __init__(
        self,
        store: ClassStore,
        inputs: StepInputs,
        embeddings: nd.NDArray,
        workspaces: list[Workspace],
    ):
        self._store = store
        self._inputs = inputs
        self._context = embeddings.context
        self._workspaces: list[Workspace] | None = workspaces
        self._leaves: tuple[nd.NDArray, nd.NDArray] | None = None
        inverse = inverse_norm(embeddings) if inputs.normalize else None
        unit = scale_rows(embeddings, inverse) if inputs.normalize else embeddings
        self._shards = [
            ShardStep(shard, inputs, unit.as_in_context(shard.device), workspace)
            for shard, workspace in zip(store.shards, workspaces)
        ]
        self.negatives, self.z_y, directions = self._over_all_processes(unit)
        self._grads: tuple[nd.NDArray, ...] = ()
        if inputs.for_training:
            self._grads = self._grad_embeddings(embeddings, inverse, directions)

    def _over_all_processes(self, unit: nd.NDArray) -> tuple[NegativeSums, nd.NDArray, nd.NDArray]:
        """Return the negatives' sums, z_y (B,) and its gradient to the normalised embeddings."""
        negatives = self._over_shards(unit)
        z_y, directions = self._targets(unit)
        group = self._store.group
        if group.size == 1:
            return negatives, z_y, directions
        numbers = group.gather("log-sum-exps", nd.stack(*negatives[:3]))
        parts = [NegativeSums(*part, None) for part in numbers.reshape((group.size, 3, -1))]
        whole = combine_negatives(parts)
        vectors = [z_y, directions]
        if self._inputs.for_training:
            vectors.append(scale_rows(negatives.grad_embedding, nd.exp(negatives.n - whole.n)))
        z_y, directions, *grads = group.sum_arrays("vectors", vectors)
        return whole._replace(grad_embedding=grads[0] if grads else None), z_y, directions

    def _over_shards(self, unit: nd.NDArray) -> NegativeSums:
        parts = []
        for shard_step in self._shards:
            part = shard_step.negatives()
            if part is not None:
                parts.append(part.as_in_context(self._context))
                self._take_turns()
        if parts:
            return combine_negatives(parts)
        samples = self._inputs.draw.samples
        count = len(unit) if samples is None else len(samples)
        nothing = nd.full((count,), NOTHING, ctx=self._context)
        no_gradient = nd.zeros((count, unit.shape[1]), ctx=self._context)
        return NegativeSums(nothing, nd.zeros_like(nothing), nothing, no_gradient)

    def _take_turns(self) -> None:
        if self._store.one_at_a_time:
            nd.waitall()

    def _targets(self, unit: nd.NDArray) -> tuple[nd.NDArray, nd.NDArray]:
        """Return z_y, (B,), and its gradient, (B, D); 0 for classes of other processes."""
        owners = [shard_step for shard_step in self._shards if len(shard_step.samples)]
        parts = [
            [value.as_in_context(self._context) for value in shard_step.targets()]
            for shard_step in owners
        ]
        batch = len(self._inputs.labels)
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
        of_n = self._inputs.scale * self.negatives.grad_embedding
        samples = self._inputs.draw.samples
        if samples is not None:
            index = self._index(samples).reshape((1, -1))
            of_n = nd.scatter_nd(of_n, index, shape=embeddings.shape)
        if inverse is None:
            return directions, of_n
        return tuple(project(grad, embeddings, inverse) for grad in (directions, of_n))

    def record(self, embeddings: nd.NDArray) -> tuple[nd.NDArray, nd.NDArray]:
        """Return z_y and n, (B,) each, as functions of the embeddings in the graph MXNet records.

        A sample without negatives has an n of -1e30.
        """
        values = (self.z_y, self._n_of_all_samples())
        if not self._inputs.for_training:
            return values
        self._leaves = tuple(nd.zeros_like(value) for value in values)
        outputs = []
        for value, leaf, grad in zip(values, self._leaves, self._grads):
            leaf.attach_grad()
            linear = row_sum(embeddings * grad).reshape(-1)
            outputs.append(value + (linear - linear.detach()) + leaf)
        return tuple(outputs)

    def _n_of_all_samples(self) -> nd.NDArray:
        samples, n = self._inputs.draw.samples, self.negatives.n
        if samples is None:
            return n
        nothing = np.full(len(self._inputs.labels), NOTHING, np.float32)
        nothing[samples] = 0
        index = self._index(samples).reshape((1, -1))
        n = nd.scatter_nd(n, index, shape=nothing.shape)
        return n + from_numpy(nothing, self._context, "float32")

    @property
    def went_backward(self) -> bool:
        """Whether ``backward`` has passed through what `record` returned."""
        return self._leaves is not None and any(leaf._fresh_grad for leaf in self._leaves)

    def release(self) -> list[Workspace]:
        """Give the memory back; from now on the step has no gradients to class weights."""
        workspaces, self._workspaces = self._workspaces, None
        if workspaces is None:
            raise RuntimeError("the memory of this step was given back already")
        self._shards = []
        return workspaces

    def weight_gradients(self) -> Iterator[tuple[int, slice | np.ndarray, RowGradient]]:
        """Make the gradients to the class weights, block by block.

        Yields
        ------
        shard : int
            The shard's number.
        class_rows, gradient
            As in `ShardStep.weight_gradients`.
        """
        if self._workspaces is None:
            raise RuntimeError("the gradients of this step were taken or given up already")
        grad_z_y, grad_n = (leaf.grad for leaf in self._leaves)
        samples = self._inputs.draw.samples
        if samples is not None:
            grad_n = nd.take(grad_n, self._index(samples))
        for number, shard_step in enumerate(self._shards):
            device = shard_step.shard.device
            arrays = (grad_z_y, grad_n, self.negatives.n)
            arrays = (array.as_in_context(device) for array in arrays)
            for class_rows, gradient in shard_step.weight_gradients(*arrays):
                yield number, class_rows, gradient
            self._take_turns()

    def orthogonal_n(self) -> float:
        """Return what n would be if every negative were orthogonal to its sample."""
        drawn, labels = self._count_negatives()
        total = drawn * math.exp(self._inputs.draw.correction) + labels
        return math.log(total) if total else NOTHING

    def inter_share(self) -> float:
        """Return by what the mean inter loss is multiplied because some samples have none."""
        draw, labels = self._inputs.draw, self._inputs.labels
        share = 1.0 if draw.samples is None else len(draw.samples) / len(labels)
        return share if draw.inter_weight is None else share * draw.inter_weight

    def _count_negatives(self) -> tuple[int, int]:
        """Count a sample's negatives: those that were drawn, and those that are labels."""
        classes = self._inputs.draw.classes
        if classes is None:
            return 0, self._store.shape[0] - 1
        if not self._inputs.draw.labels_are_negatives:
            return len(classes), 0
        return len(classes), len(np.unique(self._inputs.labels)) - 1

    def stats(self) -> dict[str, float]:
        """Return figures of the batch, for `Head.stats`."""
        labels, draw, scale = self._inputs[:3]
        z_y = self.z_y if draw.samples is None else nd.take(self.z_y, self._index(draw.samples))
        count = sum(self._count_negatives()) * len(z_y)
        touched = self._store.shape[0]
        if draw.classes is not None:
            touched = len(draw.classes) + len(np.unique(labels))
        return {
            "accuracy": float((scale * z_y > self.negatives.logit_max).mean().asscalar()),
            "positive_cosine": float(self.z_y.mean().asscalar()),
            "negative_cosine": float(self.negatives.logit_sum.sum().asscalar())
            / scale
            / max(count, 1),
            "max_negative_cosine": float(self.negatives.logit_max.max().asscalar()) / scale,
            "rows_touched": touched,
        }

    def _index(self, positions: np.ndarray) -> nd.NDArray:
        return from_numpy(positions, self._context)


class Steps:
    """Owns the memory of a head's steps, and knows which of them may hand out gradients.

    The life of a training step: its forward pass makes it *pending* (`run`); after its backward
    pass its gradients are taken once (`take_gradients`); then, or when a newer step supersedes it,
    its memory serves the next one. Any other order is an error.

    Parameters
    ----------
    store : ClassStore
    """

    def __init__(self, store: ClassStore):
        self._store = store
        self._pending: Step | None = None  # the last training step, until its gradients are taken
        self._superseded: list[Step] = []  # training steps before it that had no update
        self._idle_workspaces: list[Workspace] | None = None

    def run(self, inputs: StepInputs, embeddings: nd.NDArray) -> Step:
        """Do the forward pass of a step, (B, D) embeddings against the class weights."""
        if inputs.for_training:
            self._supersede()
        workspaces, self._idle_workspaces = self._idle_workspaces, None
        if workspaces is None:
            workspaces = [Workspace(shard.device) for shard in self._store.shards]
        step = Step(self._store, inputs, embeddings, workspaces)
        if inputs.for_training:
            self._pending = step
        else:
            self._retire(step)
        return step

    def _retire(self, step: Step) -> None:
        self._idle_workspaces = step.release()

    def _supersede(self) -> None:
        """Let a new step take the pending one's place, as a new gradient overwrites an old one."""
        if self._pending is not None:
            self._retire(self._pending)
            self._superseded.append(self._pending)
            self._pending = None
        waiting = [step for step in self._superseded if not step.went_backward]
        self._superseded = waiting[-SUPERSEDED_STEPS:]

    def take_gradients(self) -> Iterator[tuple[int, slice | np.ndarray, RowGradient]]:
        """Hand out, once, the gradients to the class weights of the pending step.

        Returns
        -------
        iterator of (shard, class_rows, gradient)
            As in `Step.weight_gradients`. Until it is exhausted it owns the step's memory.

        Raises
        ------
        StaleGradientError
            There was no backward pass since the last call.
        RuntimeError
            Backward passed through several steps, or through one that was superseded.
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
            problem = (
                f"{len(backward)} batches went backward at once"
                if len(backward) > 1
                else "the batch that went backward is not the last one"
            )
            raise RuntimeError(
                f"{problem}, but a head holds the gradients of one: call backward and step for "
                "each batch before the next"
            )
        return self._gradients_of(step)

    def _gradients_of(self, step: Step) -> Iterator[tuple[int, slice | np.ndarray, RowGradient]]:
        try:
            yield from step.weight_gradients()
        finally:
            self._retire(step)
