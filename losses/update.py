"""The updates of a head: which batches belong to one, and who may use its gradients.

Most updates are of one batch. An update of several *micro-batches* is announced with all of their
labels, so that its negatives are those of one large batch. Each micro-batch leaves two numbers per
sample, the gradients to z_y and n. From those of all micro-batches the gradients to the class
weights are made at once, block by block, as for one large batch whose logits are not kept.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Iterator

import numpy as np
from mxnet import nd

from dsoftmax.losses.figures import Figures
from dsoftmax.losses.kernels import RowGradient, Workspace, from_numpy
from dsoftmax.losses.negatives import NegativeSums
from dsoftmax.losses.reductions import join
from dsoftmax.losses.step import ReductionMaker, ShardRows, ShardStep, Step, StepInputs
from dsoftmax.losses.stores.base import ClassStore

SUPERSEDED_UPDATES = 4  # that are watched for a backward pass that comes too late


class StaleGradientError(RuntimeError):
    """There was no backward pass since the last update."""


def check_lengths(lengths: np.ndarray) -> None:
    """Refuse embeddings of which some lengths, (B,), are not finite."""
    bad = np.flatnonzero(~np.isfinite(lengths))
    if bad.size:
        raise ValueError(
            f"{bad.size} of {len(lengths)} embeddings hold NaN or infinite numbers, sample "
            f"{bad[0]} is the first: the network before the head has diverged (try a lower "
            "learning rate, a warm-up or gradient clipping)"
        )


class Update:
    """One update of the class weights: its class rows and its batches.

    Making it fetches the class rows. Made by `Updates`, which lends it the memory.

    Parameters
    ----------
    store : ClassStore
    inputs : StepInputs
        Of the samples of all batches.
    sizes : list of int
        How many samples each batch has.
    is_announced : bool
        Whether it was begun by `Updates.begin`.
    workspaces : list of Workspace
        One per shard, lent until `release`.

    Attributes
    ----------
    loss_parts : dict of str to list of (B,)
        The intra-class and the inter-class loss of each batch so far; the head fills it.
    """

    def __init__(
        self,
        store: ClassStore,
        inputs: StepInputs,
        sizes: list[int],
        is_announced: bool,
        workspaces: list[Workspace],
    ):
        self._store = store
        self._inputs = inputs._replace(keeps_logits=len(sizes) == 1)
        self._borders = np.cumsum([0, *sizes])
        self.is_announced = is_announced
        self._workspaces: list[Workspace] | None = workspaces
        self._rows = [
            ShardRows(shard, store.shape[1], inputs, workspace)
            for shard, workspace in zip(store.shards, workspaces)
        ]
        self._steps: list[Step] = []
        self._losses: list[nd.NDArray] = []  # (B, 2) of each batch: losses, embeddings' lengths
        self._mean_loss: float | None = None  # of them, once it was read
        self._learned: list[dict[str, nd.NDArray]] = []  # the learned numbers that each batch used
        self.loss_parts: dict[str, list[nd.NDArray]] = {"intra": [], "inter": []}

    @property
    def count(self) -> int:
        """The number of batches."""
        return len(self._borders) - 1

    @property
    def is_whole(self) -> bool:
        """Whether all batches went forward."""
        return len(self._steps) == self.count

    @property
    def went_backward(self) -> bool:
        """Whether ``backward`` has passed through any batch."""
        return any(step.went_backward for step in self._steps)

    @property
    def missing(self) -> int:
        """The number of batches that did not go backward."""
        return self.count - sum(step.went_backward for step in self._steps)

    def run(
        self, labels: np.ndarray, embeddings: nd.NDArray, make_reduction: ReductionMaker
    ) -> Step:
        """Do the forward pass of the next batch."""
        number = len(self._steps)
        inputs = self._inputs.of_part(self._borders[number], self._borders[number + 1])
        if not np.array_equal(labels, inputs.labels):
            raise ValueError(
                f"micro-batch {number + 1} of {self.count} has other labels than begin_update was "
                "given for it"
            )
        step = Step(self._store, inputs, embeddings, self._rows, self._workspaces, make_reduction)
        self._steps.append(step)
        return step

    def watch(self, loss: nd.NDArray, lengths: nd.NDArray, learned: dict[str, nd.NDArray]) -> None:
        """Take up what a batch has computed.

        Parameters
        ----------
        loss, lengths : (B,)
            The loss of each sample, and the length of its embedding.
        learned : dict of str to (1,)
            The copies of the criterion's learned numbers that receive this batch's gradients.
        """
        self._learned.append(learned)
        self._losses.append(nd.stack(loss.detach(), lengths.detach(), axis=1))
        self._mean_loss = None

    def read_loss(self) -> float:
        """Return the mean loss of the batches so far; see `Head.read_loss`."""
        if self._mean_loss is None:
            numbers = _join(self._losses).asnumpy()
            # A loss may be finite although the embedding is not: 1 / length is 0 if it overflows.
            check_lengths(numbers[:, 1])
            bad = np.flatnonzero(~np.isfinite(numbers[:, 0]))
            if bad.size:
                raise ValueError(
                    f"the loss is not finite for {bad.size} of {len(numbers)} samples, sample "
                    f"{bad[0]} is the first"
                )
            self._mean_loss = float(numbers[:, 0].mean(dtype=np.float64))
        return self._mean_loss

    def learned_gradients(self) -> dict[str, nd.NDArray]:
        """Return the gradients to the criterion's learned numbers, (1,) each by name."""
        return {
            name: nd.add_n(*(learned[name].grad for learned in self._learned))
            for name in self._learned[0]
        }

    def release(self) -> list[Workspace]:
        """Give the memory back; from now on the update has no gradients to class weights."""
        workspaces, self._workspaces = self._workspaces, None
        if workspaces is None:
            raise RuntimeError("the memory of this update was given back already")
        self._rows = []
        for step in self._steps:
            step.release()
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
            raise RuntimeError("the gradients of this update were taken or given up already")
        received = [(*step.received(), step.n_of_all_samples()) for step in self._steps]
        grad_z_y, grad_n, n = (_join(parts) for parts in zip(*received))
        samples = self._inputs.draw.samples
        if samples is not None:
            index = from_numpy(samples, n.context)
            grad_n, n = nd.take(grad_n, index), nd.take(n, index)
        steps = [self._whole_step_of(number) for number in range(len(self._rows))]
        # All copies before all products: a copy waits for what is queued on the context it is from.
        arrays = [
            [array.as_in_context(step.shard.device) for array in (grad_z_y, grad_n, n)]
            for step in steps
        ]
        blocks = [step.weight_gradients(*given) for step, given in zip(steps, arrays)]
        # A block of each shard, then the next: MXNet lets compiled operators of one context wait
        # for those that were queued before them on another.
        for of_shards in zip_longest(*map(self._in_turns, blocks)):
            for number, block in enumerate(of_shards):
                if block is not None:
                    yield (number, *block)

    def _in_turns(self, blocks: Iterator) -> Iterator:
        for block in blocks:
            self._store.take_turns()
            yield block

    def _whole_step_of(self, number: int) -> ShardStep:
        """Return a shard's part in the step of all batches together."""
        parts = [step.shards[number] for step in self._steps]
        if len(parts) == 1:
            return parts[0]
        unit = _join([part.unit for part in parts])
        whole = ShardStep(self._rows[number], self._inputs, unit, self._workspaces[number])
        whole.reduce_by(join([step.reduction for step in self._steps]))
        return whole

    def figures(self) -> Figures:
        """Return what the figures of the batches so far are made of."""
        inputs = self._inputs.of_part(0, self._borders[len(self._steps)])
        z_y = _join([step.z_y for step in self._steps])
        # If some samples have no negatives, a batch may have none at all.
        is_partial = inputs.draw.samples is not None
        steps = [
            step for step in self._steps if not is_partial or step.inputs.draw.samples is not None
        ]
        sums = zip(*(step.negatives[:3] for step in steps))
        negatives = NegativeSums(*(_join(parts) for parts in sums))
        return Figures(self._store.num_classes, inputs, z_y, negatives, self.loss_parts)


def _join(parts) -> nd.NDArray:
    """Concatenate arrays, on the context of the first."""
    if len(parts) == 1:
        return parts[0]
    return nd.concat(*(part.as_in_context(parts[0].context) for part in parts), dim=0)


class Updates:
    """Owns the memory of a head's updates, and knows which of them may hand out gradients.

    The life of an update: the forward pass of its only batch begins it (`run`), or it is announced
    (`begin`) and then takes its micro-batches one by one. It is *pending* until its gradients are
    taken, once, after the backward pass of each batch (`take_gradients`). A newer batch supersedes
    a pending update that was not announced. Then its memory serves the next one. Any other order is
    an error.

    Parameters
    ----------
    store : ClassStore

    Attributes
    ----------
    latest : Update or None
        The one that the last batch, or the last evaluation, belongs to.
    learned_gradients : dict of str to (1,)
        Of the update whose gradients were taken last, to the criterion's learned numbers.
    """

    def __init__(self, store: ClassStore):
        self._store = store
        self._pending: Update | None = None  # the last one, until its gradients are taken
        self._superseded: list[Update] = []  # those before it whose gradients were not taken
        self._idle_workspaces: list[Workspace] | None = None
        self.latest: Update | None = None
        self.learned_gradients: dict[str, nd.NDArray] = {}

    @property
    def awaits_batches(self) -> bool:
        """Whether an announced update has not seen all of its micro-batches."""
        return self._pending is not None and not self._pending.is_whole

    def begin(self, inputs: StepInputs, sizes: list[int]) -> None:
        """Announce an update of micro-batches of these sizes, and fetch its class rows."""
        self._refuse_pending("begin_update")
        self._supersede()
        self._pending = self._make(inputs, sizes, is_announced=True)

    def drop(self) -> None:
        """Give up an announced update, whatever its batches did."""
        if self._pending is not None and self._pending.is_announced:
            self._retire(self._pending)
            self._pending = None

    def run_announced(
        self, labels: np.ndarray, embeddings: nd.NDArray, make_reduction: ReductionMaker
    ) -> Step:
        """Do the forward pass of the next micro-batch of the announced update."""
        self.latest = self._pending
        return self._pending.run(labels, embeddings, make_reduction)

    def run(
        self, inputs: StepInputs, embeddings: nd.NDArray, make_reduction: ReductionMaker
    ) -> Step:
        """Do the forward pass of a batch, (B, D) embeddings against the class weights."""
        if inputs.for_training:
            self._refuse_pending("the next batch")
            self._supersede()
        update = self._make(inputs, [len(inputs.labels)], is_announced=False)
        step = update.run(inputs.labels, embeddings, make_reduction)
        if inputs.for_training:
            self._pending = update
        else:
            self._retire(update)
        self.latest = update
        return step

    def _make(self, inputs: StepInputs, sizes: list[int], is_announced: bool) -> Update:
        workspaces, self._idle_workspaces = self._idle_workspaces, None
        if workspaces is None:
            workspaces = [Workspace(shard.device) for shard in self._store.shards]
        return Update(self._store, inputs, sizes, is_announced, workspaces)

    def _retire(self, update: Update) -> None:
        self._idle_workspaces = update.release()

    def _refuse_pending(self, what: str) -> None:
        """Refuse to lose micro-batches without a word."""
        pending = self._pending
        if pending is not None and pending.is_announced:
            raise RuntimeError(
                f"an update of {pending.count} micro-batches has begun, and "
                f"{pending.count - pending.missing} of them went backward: before {what}, finish "
                "it by the trainer's step, or give it up by drop_update"
            )

    def _supersede(self) -> None:
        """Let a new batch take the pending one's place, as a new gradient overwrites an old one."""
        if self._pending is not None:
            self._retire(self._pending)
            self._superseded.append(self._pending)
            self._pending = None
        waiting = [update for update in self._superseded if not update.went_backward]
        self._superseded = waiting[-SUPERSEDED_UPDATES:]

    def take_gradients(self) -> Iterator[tuple[int, slice | np.ndarray, RowGradient]]:
        """Hand out, once, the gradients to the class weights of the pending update.

        Returns
        -------
        iterator of (shard, class_rows, gradient)
            As in `Update.weight_gradients`. Until it is exhausted it owns the update's memory.

        Raises
        ------
        StaleGradientError
            There was no backward pass since the last call.
        RuntimeError
            Backward passed through several batches that are not one update, through a batch that
            was superseded, or not through all micro-batches.
        ValueError
            A loss or an embedding is not finite; the update is given up.
        """
        updates = [*self._superseded, *([self._pending] if self._pending else [])]
        backward = [update for update in updates if update.went_backward]
        if not backward:
            raise StaleGradientError(
                "there is no new gradient since the last step: call the head under autograd.record "
                "and backward on its loss first"
            )
        update = self._pending
        if backward == [update] and update.missing:
            raise RuntimeError(
                f"{update.missing} of the {update.count} micro-batches of this update did not go "
                "backward: call the head and backward for each of them, then step"
            )
        self._pending, self._superseded = None, []
        if len(backward) > 1 or backward[0] is not update:
            if update is not None:
                self._retire(update)
            problem = (
                f"{len(backward)} batches went backward at once"
                if len(backward) > 1
                else "the batch that went backward is not the last one"
            )
            raise RuntimeError(
                f"{problem}, but a head holds the gradients of one: call backward and step for "
                "each batch before the next, or begin_update for several micro-batches"
            )
        try:
            update.read_loss()
        except ValueError:
            self._retire(update)
            raise
        self.learned_gradients = update.learned_gradients()
        return self._gradients_of(update)

    def _gradients_of(
        self, update: Update
    ) -> Iterator[tuple[int, slice | np.ndarray, RowGradient]]:
        try:
            yield from update.weight_gradients()
        finally:
            self._retire(update)
