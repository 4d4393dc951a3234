"""z_y and n of a batch over all devices, with gradients to embeddings and class weights."""

from __future__ import annotations

import math
from typing import Iterator

import numpy as np
from mxnet import autograd, nd

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
from dsoftmax.losses.negatives import Found, ShardedLogSumExp, combine_found
from dsoftmax.losses.samplers import Draw
from dsoftmax.losses.stores import ClassStore, Shard


class Share:
    """What one device does in one step: its negatives, and the samples whose class it owns.

    Parameters
    ----------
    shard : Shard
    labels : (B,) int64
    draw : Draw
    normalize : bool
    unit : (B, D)
        The embeddings, normalised if cosines are wanted.
    scaled : (rows, D)
        Those of the rows that have an inter part, times the scale.
    chunk : int or None
    for_training : bool
    workspace : Workspace
        On the shard's device.
    """

    def __init__(
        self,
        shard: Shard,
        labels: np.ndarray,
        draw: Draw,
        normalize: bool,
        unit: nd.NDArray,
        scaled: nd.NDArray,
        chunk: int | None,
        for_training: bool,
        workspace: Workspace,
    ):
        self.shard = shard
        self.normalize = normalize
        self.unit = unit
        self.workspace = workspace
        self.samples = np.flatnonzero(shard.owned(labels))
        own_labels = labels[self.samples] - shard.start
        self.labels, self.label_of_sample = np.unique(own_labels, return_inverse=True)
        self._choose_rows(draw)
        self.negatives = None
        if self.columns:
            own = np.full(len(labels), -1, np.int64)
            if draw.labels_are_negatives:
                own[self.samples] = self.label_rows[self.label_of_sample]
            self.negatives = ShardedLogSumExp(
                scaled,
                self.weight[: self.columns],
                normalize,
                own if draw.rows is None else own[draw.rows],
                self._offset(draw.correction),
                chunk,
                for_training,
                workspace,
            )

    def _choose_rows(self, draw: Draw) -> None:
        """Set what is used of the shard: `rows` (None for all), their `weight`, `columns` of n."""
        if draw.classes is None:
            self.rows = None
            self.weight = self.shard.weight
            self.label_rows = self.labels
            self.rows_touched = self.columns = len(self.shard)
            return
        others = draw.classes[self.shard.owned(draw.classes)] - self.shard.start
        # Labels come last: their rows are one slice, whether they are negatives or not.
        self.rows = np.concatenate([others, self.labels])
        self.rows_touched = len(self.rows)
        self.label_rows = len(others) + np.arange(len(self.labels))
        self.columns = self.rows_touched if draw.labels_are_negatives else len(others)
        if self.rows_touched:
            self.weight = self.workspace.get("rows", self.rows_touched, self.unit.shape[1])
            self.shard.gather(self.rows, self.weight)

    def _offset(self, correction: float) -> nd.NDArray | None:
        if not correction:
            return None
        offset = np.zeros((1, self.columns), np.float32)
        offset[:, : len(self.rows) - len(self.labels)] = correction
        return from_numpy(offset, self.shard.device, "float32")

    def targets(self) -> tuple[nd.NDArray, nd.NDArray]:
        """Return the cosines of this share's samples with their classes, and their directions.

        Returns
        -------
        cosine : (samples,)
        direction : (samples, D)
            The gradient of the cosine to the normalised embedding.
        """
        self._own_unit = take_rows(self.unit, self.samples)
        self._own_weight = take_rows(self.weight, self.label_rows[self.label_of_sample])
        direction = self._own_weight
        if self.normalize:
            self._own_inverse = inverse_norm(self._own_weight)
            direction = scale_rows(direction, self._own_inverse)
        return row_sum(self._own_unit * direction).reshape(-1), direction

    def weight_gradients(
        self, to_z_y: nd.NDArray, to_n: nd.NDArray, n: nd.NDArray
    ) -> Iterator[tuple[slice | np.ndarray, RowGradient]]:
        """Make the gradient to this share's class weights, a block at a time.

        Parameters
        ----------
        to_z_y : (B,)
            The gradient to z_y, on the shard's device like all.
        to_n : (rows,)
            The gradient to n.
        n : (rows,)
            n over all devices.

        Yields
        ------
        rows : slice or (classes,) int64
            Of the shard.
        gradient : RowGradient
            To be used before the next is asked for.
        """
        targets = self._target_gradient(to_z_y) if len(self.samples) else None
        if self.negatives:
            for number, block in enumerate(self.negatives.blocks):
                gradient = self.negatives.weight_gradient(number, to_n, n)
                inside = np.flatnonzero(
                    (self.label_rows >= block.start) & (self.label_rows < block.stop)
                )
                if len(inside):
                    add_rows(
                        gradient.values,
                        self.label_rows[inside] - block.start,
                        take_rows(targets, inside),
                    )
                yield block if self.rows is None else self.rows[block], gradient
        if self.columns < self.rows_touched:  # the labels are no negatives
            yield self.labels, RowGradient(targets)

    def _target_gradient(self, to_z_y: nd.NDArray) -> nd.NDArray:
        """Return the gradient of the targets to the weights of `labels`, (labels, D)."""
        device = self.shard.device
        samples = from_numpy(self.samples, device)
        to_weight = scale_rows(self._own_unit, nd.take(to_z_y, samples))
        if self.normalize:
            to_weight = project(to_weight, self._own_weight, self._own_inverse)
        # Samples of one class are added up by a product with 0s and 1s.
        belongs = np.arange(len(self.labels))[:, None] == self.label_of_sample
        return nd.dot(from_numpy(belongs, device, "float32"), to_weight)


class Similarities(autograd.Function):
    """z_y and n of one batch.

    Both are one number a sample, so that their gradients to the embedding are one vector a sample
    each. These are found on the way forward; on the way back they are scaled and added. Only
    embeddings, z_y, n and their gradients travel between devices.

    Parameters
    ----------
    store : ClassStore
    labels : (B,) int64
    draw : Draw
    scale : float
    normalize : bool
    chunk : int or None
    workspaces : list of Workspace
        One a shard. They must not be used otherwise until this batch `is_finished`.
    came_back : list
        Where this batch enters itself when its backward pass is done.

    Inputs:
        - **embeddings**: (B, D).
        - **anchor**: (1,), an array with a gradient attached, so that there is a backward pass
          even where the embeddings need none (a frozen network).

    Outputs:
        - **z_y**, **n**: (B,) each, on the embeddings' context.
    """

    def __init__(
        self,
        store: ClassStore,
        labels: np.ndarray,
        draw: Draw,
        scale: float,
        normalize: bool,
        chunk: int | None,
        workspaces: list[Workspace],
        came_back: list[Similarities],
    ):
        super().__init__()
        self.workspaces = workspaces
        self._came_back = came_back
        self.store = store
        self.labels = labels
        self.draw = draw
        self.scale = scale
        self.normalize = normalize
        self.chunk = chunk
        self.for_training = autograd.is_recording()
        self.is_finished = not self.for_training

    def forward(self, embeddings, anchor):
        """Compute z_y and n."""
        rows = self.draw.rows
        self.context = embeddings.context
        self.embeddings = embeddings
        self.inverse = inverse_norm(embeddings) if self.normalize else None
        unit = scale_rows(embeddings, self.inverse) if self.normalize else embeddings
        scaled = self.scale * (unit if rows is None else take_rows(unit, rows))
        self.shares = [
            Share(
                shard,
                self.labels,
                self.draw,
                self.normalize,
                unit.as_in_context(shard.device),
                scaled.as_in_context(shard.device),
                self.chunk,
                self.for_training,
                workspace,
            )
            for shard, workspace in zip(self.store.shards, self.workspaces)
        ]
        self.found, self.z_y, self._directions = self._find(scaled)
        if rows is None:
            return self.z_y, self.found.n
        nothing = np.full(len(self.labels), NOTHING, np.float32)
        nothing[rows] = 0
        index = self._index(rows).reshape((1, -1))
        n = nd.scatter_nd(self.found.n, index, shape=self.z_y.shape)
        return self.z_y, n + from_numpy(nothing, self.context, "float32")

    def _find(self, scaled: nd.NDArray) -> tuple[Found, nd.NDArray, nd.NDArray]:
        """Look at the classes of all processes.

        Returns
        -------
        found : Found
            Of the negatives.
        z_y : (B,)
        directions : (B, D)
            The gradient of z_y to the normalised embeddings.
        """
        found = self._find_negatives(scaled)
        z_y, directions = self._find_targets()
        group = self.store.group
        if group.size == 1:
            return found, z_y, directions
        numbers = group.gather("log-sum-exps", nd.stack(found.n, found.total, found.largest))
        whole = combine_found([Found(*part, None) for part in numbers.reshape((group.size, 3, -1))])
        vectors = [z_y, directions]
        if self.for_training:
            vectors.append(scale_rows(found.pull, nd.exp(found.n - whole.n)))
        z_y, directions, *pull = group.sum_arrays("vectors", vectors)
        return whole._replace(pull=pull[0] if pull else None), z_y, directions

    def _find_negatives(self, scaled: nd.NDArray) -> Found:
        found = []
        for share in self.shares:
            if share.negatives:
                found.append(share.negatives.forward())
                if self.store.one_at_a_time:
                    nd.waitall()
        if found:
            return combine_found([part.as_in_context(self.context) for part in found])
        nothing = nd.full((len(scaled),), NOTHING, ctx=self.context)
        return Found(nothing, nd.zeros_like(nothing), nothing, nd.zeros_like(scaled))

    def _find_targets(self) -> tuple[nd.NDArray, nd.NDArray]:
        """Return z_y, (B,), and its gradient, (B, D); 0 for classes of other processes."""
        owners = [share for share in self.shares if len(share.samples)]
        found = [
            [value.as_in_context(self.context) for value in share.targets()] for share in owners
        ]
        if not found:
            return nd.zeros((len(self.labels),), ctx=self.context), nd.zeros_like(self.embeddings)
        if len(found) == 1 and len(owners[0].samples) == len(self.labels):
            return tuple(found[0])
        cosine, direction = (nd.concat(*parts, dim=0) for parts in zip(*found))
        samples = np.concatenate([share.samples for share in owners])
        if len(samples) == len(self.labels):
            order = np.argsort(samples)
            return nd.take(cosine, self._index(order)), take_rows(direction, order)
        index = self._index(samples).reshape((1, -1))
        return (
            nd.scatter_nd(cosine, index, shape=self.labels.shape),
            nd.scatter_nd(direction, index, shape=self.embeddings.shape),
        )

    def backward(self, to_z_y, to_n):
        """Send the gradients back; those to the class weights are made when they are asked for."""
        if self.is_finished:
            raise RuntimeError("a second backward pass through a head is not possible")
        rows = self.draw.rows
        self._to_z_y = to_z_y.copy()
        self._to_n = to_n.copy() if rows is None else nd.take(to_n, self._index(rows))
        to_unit = scale_rows(self._directions, self._to_z_y)
        from_negatives = scale_rows(self.found.pull, self.scale * self._to_n)
        if rows is None:
            to_unit += from_negatives
        else:
            add_rows(to_unit, rows, from_negatives)
        self._came_back.append(self)
        if self.inverse is not None:
            to_unit = project(to_unit, self.embeddings, self.inverse)
        return to_unit, nd.zeros((1,), ctx=self.context)

    def weight_gradients(self) -> Iterator[tuple[int, slice | np.ndarray, RowGradient]]:
        """Make the gradients to the class weights, a block at a time.

        Yields
        ------
        shard : int
            Its number.
        rows, gradient
            As of `Share.weight_gradients`.
        """
        for number, share in enumerate(self.shares):
            passed = (self._to_z_y, self._to_n, self.found.n)
            passed = (value.as_in_context(share.shard.device) for value in passed)
            for rows, gradient in share.weight_gradients(*passed):
                yield number, rows, gradient
            if self.store.one_at_a_time:
                nd.waitall()

    def stats(self) -> dict[str, float]:
        """Return what the batch looked like."""
        rows, classes = self.draw.rows, self.draw.classes
        if classes is None:
            touched = self.store.shape[0]
        else:
            touched = len(classes) + len(np.unique(self.labels))
        # Where labels are negatives, all but the own one.
        negatives = touched - 1 if self.draw.labels_are_negatives else len(classes)
        samples = len(self.labels if rows is None else rows)
        z_y = self.z_y if rows is None else nd.take(self.z_y, self._index(rows))
        return {
            "accuracy": float((self.scale * z_y > self.found.largest).mean().asscalar()),
            "positive_cosine": float(self.z_y.mean().asscalar()),
            "negative_cosine": float(self.found.total.sum().asscalar())
            / self.scale
            / max(negatives * samples, 1),
            "max_negative_cosine": float(self.found.largest.max().asscalar()) / self.scale,
            "inter_floor": math.log1p(negatives),
            "rows_touched": touched,
        }

    def _index(self, positions: np.ndarray) -> nd.NDArray:
        return from_numpy(positions, self.context)
