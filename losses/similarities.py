"""z_y and n of a batch over all devices, with gradients to embeddings and class weights."""

from __future__ import annotations

import numpy as np
from mxnet import autograd, nd

from dsoftmax.losses.negatives import (
    NOTHING,
    ShardedLogSumExp,
    Workspace,
    combine,
    inverse_norm,
    project,
)
from dsoftmax.losses.samplers import Draw
from dsoftmax.losses.stores import ClassStore, Shard, add_rows, take_rows


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
        self.has_own = np.zeros(len(labels), bool)
        self.negatives = None
        if self.columns:
            own = np.full(len(labels), -1, np.int64)
            if draw.labels_are_negatives:
                own[self.samples] = self.label_rows[self.label_of_sample]
                self.has_own[self.samples] = True
            self.negatives = ShardedLogSumExp(
                scaled,
                self.weight[: self.columns],
                normalize,
                own if draw.rows is None else own[draw.rows],
                self._offset(draw.correction),
                chunk,
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
        return nd.array(offset, ctx=self.shard.device)

    def target_cosine(self) -> nd.NDArray:
        """Return the cosines of this share's samples with their classes, (samples,)."""
        self._own_unit = take_rows(self.unit, self.samples)
        self._own_weight = take_rows(self.weight, self.label_rows[self.label_of_sample])
        ones = nd.ones((self.unit.shape[1], 1), ctx=self.shard.device)
        cosine = nd.dot(self._own_unit * self._own_weight, ones)
        if self.normalize:
            self._own_inverse = inverse_norm(self._own_weight)
            cosine = cosine * self._own_inverse
        return cosine.reshape(-1)

    def backward(
        self, to_n: nd.NDArray, n: nd.NDArray, to_target: nd.NDArray | None
    ) -> tuple[nd.NDArray | None, nd.NDArray | None]:
        """Send the gradients to n and to the targets back; that to the weights is `gradient`.

        Returns
        -------
        to_scaled : (rows, D) or None
        to_unit : (samples, D) or None
            Of this share's samples.
        """
        to_scaled = to_unit = self.gradient = None
        if self.rows_touched:
            width = self.unit.shape[1]
            self.gradient = self.workspace.get("gradient", self.rows_touched, width)
        if self.negatives:
            to_scaled = self.negatives.backward(to_n, n, self.gradient[: self.columns])
        if to_target is not None:
            to_target = to_target.expand_dims(1)
            to_weight = to_target * self._own_unit
            if self.normalize:
                to_target = to_target * self._own_inverse
                project(to_weight, self._own_weight, self._own_inverse)
            to_unit = to_target * self._own_weight
            if self.columns < self.rows_touched:  # the labels are no negatives
                self.gradient[self.columns :] = 0
            # Samples of one class are added up by a product with 0s and 1s.
            belongs = np.arange(len(self.labels))[:, None] == self.label_of_sample
            belongs = nd.array(belongs, ctx=self.shard.device, dtype="float32")
            add_rows(self.gradient, self.label_rows, nd.dot(belongs, to_weight))
        return to_scaled, to_unit


class Similarities(autograd.Function):
    """z_y and n of one batch.

    Only embeddings, z_y, n and their gradients travel between devices.

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
        Where this batch enters itself when its backward pass is done, with its `gradients`.

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
        self.is_finished = not autograd.is_recording()

    def forward(self, embeddings, anchor):
        """Compute z_y and n."""
        rows = self.draw.rows
        self.context = embeddings.context
        self.embeddings = embeddings
        self.inverse = inverse_norm(embeddings) if self.normalize else None
        unit = nd.broadcast_mul(embeddings, self.inverse) if self.normalize else embeddings
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
                workspace,
            )
            for shard, workspace in zip(self.store.shards, self.workspaces)
        ]
        found = [share.negatives.forward() for share in self.shares if share.negatives]
        found = [[value.as_in_context(self.context) for value in values] for values in found]
        if found:
            parts, totals, largests = zip(*found)
            self.n = combine(list(parts))
            self.total = nd.add_n(*totals)
            self.largest = nd.max(nd.stack(*largests, axis=1), axis=1)
        else:
            count = len(self.labels) if rows is None else len(rows)
            self.n = self.largest = nd.full((count,), NOTHING, ctx=self.context)
            self.total = nd.zeros((count,), ctx=self.context)
        z_y = self._gather_targets()
        self.z_y = z_y
        if rows is None:
            return z_y, self.n
        nothing = np.full(len(self.labels), NOTHING, np.float32)
        nothing[rows] = 0
        found = nd.scatter_nd(self.n, self._index(rows).reshape((1, -1)), shape=z_y.shape)
        return z_y, found + nd.array(nothing, ctx=self.context)

    def _gather_targets(self) -> nd.NDArray:
        z_y = nd.zeros((len(self.labels),), ctx=self.context)
        for share in self.shares:
            if len(share.samples):
                cosine = share.target_cosine().as_in_context(self.context)
                index = self._index(share.samples).reshape((1, -1))
                z_y = z_y + nd.scatter_nd(cosine, index, shape=z_y.shape)
        return z_y

    def backward(self, to_z_y, to_n):
        """Send the gradients back; those to the class weights wait to be taken."""
        if self.is_finished:
            raise RuntimeError("a second backward pass through a head is not possible")
        rows = self.draw.rows
        if rows is not None:
            to_n = nd.take(to_n, self._index(rows))
        to_unit = nd.zeros_like(self.embeddings)
        for share in self.shares:
            device, to_target = share.shard.device, None
            if len(share.samples):
                to_target = nd.take(to_z_y, self._index(share.samples)).as_in_context(device)
            to_scaled, to_samples = share.backward(
                to_n.as_in_context(device), self.n.as_in_context(device), to_target
            )
            if to_scaled is not None:
                to_scaled = self.scale * to_scaled.as_in_context(self.context)
                if rows is None:
                    to_unit += to_scaled
                else:
                    add_rows(to_unit, rows, to_scaled)
            if to_samples is not None:
                add_rows(to_unit, share.samples, to_samples.as_in_context(self.context))
        self._came_back.append(self)
        if self.inverse is not None:
            project(to_unit, self.embeddings, self.inverse)
        return to_unit, nd.zeros((1,), ctx=self.context)

    @property
    def gradients(self) -> list[tuple[np.ndarray | None, nd.NDArray | None]]:
        """Each shard's rows in use (None for all) and the gradient to them."""
        return [(share.rows, share.gradient) for share in self.shares]

    def stats(self) -> dict[str, float]:
        """Return what the batch looked like."""
        rows = self.draw.rows
        used = slice(None) if rows is None else rows
        negatives = sum(share.columns for share in self.shares) - sum(
            share.has_own[used].astype(int) for share in self.shares
        )
        count = int(np.sum(negatives))
        return {
            "positive_cosine": float(self.z_y.mean().asscalar()),
            "negative_cosine": float(self.total.sum().asscalar()) / self.scale / max(count, 1),
            "max_negative_cosine": float(self.largest.max().asscalar()) / self.scale,
            "inter_floor": float(np.log1p(negatives).mean()),
            "rows_touched": sum(share.rows_touched for share in self.shares),
        }

    def _index(self, positions: np.ndarray) -> nd.NDArray:
        return nd.array(positions, ctx=self.context, dtype="int32")
