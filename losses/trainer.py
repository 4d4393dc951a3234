"""Updates of the class weights, with the interface of a ``gluon.Trainer``."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import mxnet as mx
import numpy as np
from mxnet import nd

from dsoftmax.recognition.files import AtomicFile

if TYPE_CHECKING:
    from dsoftmax.losses.head import Head

# Those whose update of some rows leaves the others, weight and state, alone.
LAZY_OPTIMIZERS = ("adagrad", "adam", "ftrl", "sgd")


class StaleGradientError(RuntimeError):
    """A step without a backward pass since the last one."""


class HeadTrainer:
    """Applies an optimizer of MXNet's to the class weights of a head.

    With sampled classes only the rows in use are updated. Momentum and weight decay of the others
    wait until they are used again: this *lazy* update is not the dense one, and the same wherever
    the weights live.

    Parameters
    ----------
    head : Head
    optimizer : str or mx.optimizer.Optimizer
    optimizer_params : dict
        As of ``gluon.Trainer``.
    """

    def __init__(self, head: Head, optimizer, optimizer_params: dict):
        self._head = head
        if isinstance(optimizer, str):
            optimizer = mx.optimizer.create(optimizer, **optimizer_params)
        elif optimizer_params:
            raise ValueError("optimizer_params must be empty for an optimizer that is made already")
        name = type(optimizer).__name__.lower()
        if head.sampler.is_sparse:
            if name not in LAZY_OPTIMIZERS:
                raise ValueError(
                    f"{name} has no update of single rows, which sampled classes need; legal are "
                    f"{', '.join(LAZY_OPTIMIZERS)}"
                )
            if hasattr(optimizer, "lazy_update"):
                optimizer.lazy_update = True
        self._optimizer = optimizer
        self._scale = optimizer.rescale_grad
        self._updater = mx.optimizer.get_updater(optimizer)

    @property
    def optimizer(self) -> mx.optimizer.Optimizer:
        """The optimizer."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self._optimizer.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the steps to come."""
        self._optimizer.set_learning_rate(lr)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Update the class weights by the gradients of the last backward pass.

        Parameters
        ----------
        batch_size : int
            Gradients are divided by it.
        ignore_stale_grad : bool
            Do nothing, instead of raising, where there was no backward pass since the last step.
        """
        try:
            gradients = self._head.take_gradients()
        except StaleGradientError:
            if ignore_stale_grad:
                return
            raise
        self._optimizer.rescale_grad = self._scale / batch_size
        for number, (shard, (rows, gradient)) in enumerate(zip(self._head.store.shards, gradients)):
            if rows is None:
                self._updater(number, gradient.as_in_context(shard.home), shard.weight)
            elif len(rows):
                index = nd.array(rows, ctx=shard.home, dtype="int64")
                sparse = nd.sparse.row_sparse_array(
                    (gradient.as_in_context(shard.home), index),
                    shape=shard.weight.shape,
                    ctx=shard.home,
                )
                self._updater(number, sparse, shard.weight)
            else:  # a step counts on every shard, or Adam's would drift apart
                self._optimizer._set_current_context(shard.home.device_id)
                self._optimizer._update_count(number)

    def save_states(self, path: str) -> None:
        """Save the optimizer's state, in a form that does not depend on the number of devices."""
        self._ensure_states()
        shards = [self._updater.states[number] for number in range(len(self._head.store.shards))]
        parts = [_as_tuple(state) for state in shards]
        content = {
            f"state{place}": nd.array(np.concatenate([part[place].asnumpy() for part in parts]))
            for place in range(len(parts[0]))
        }
        # MXNet counts the updates by device and array; ours are all the same.
        counts = [
            count
            for of_device in self._optimizer._all_index_update_counts.values()
            for count in of_device.values()
        ]
        facts = {
            "optimizer": type(self._optimizer).__name__,
            "num_update": max([self._optimizer.begin_num_update, *counts]),
            "learning_rate": self._optimizer.lr,
            "step": self._head.step,
            "criterion": self._head.criterion.state,
        }
        content["facts"] = nd.array(
            np.frombuffer(json.dumps(facts).encode(), np.uint8), dtype="uint8"
        )
        # nd.save takes a name, not a stream: give it the temporary one.
        with AtomicFile(path) as file:
            nd.save(file.name, content)

    def load_states(self, path: str) -> None:
        """Load what `save_states` saved, on any number of devices."""
        content = nd.load(os.fspath(path))
        if not isinstance(content, dict) or "facts" not in content:
            raise ValueError(f"{path}: no state of a head's trainer")
        facts = json.loads(content.pop("facts").asnumpy().tobytes())
        if facts["optimizer"] != type(self._optimizer).__name__:
            raise ValueError(
                f"{path}: the state is {facts['optimizer']}'s, not "
                f"{type(self._optimizer).__name__}'s"
            )
        self._ensure_states()
        arrays = [content[f"state{place}"] for place in range(len(content))]
        for number, shard in enumerate(self._head.store.shards):
            state = _as_tuple(self._updater.states[number])
            if len(state) != len(arrays) or any(len(a) != self._head.num_classes for a in arrays):
                raise ValueError(
                    f"{path}: the state is not that of {self._head.num_classes} classes with these "
                    "options of the optimizer"
                )
            for target, array in zip(state, arrays):
                target[:] = array[shard.start : shard.stop]
            self._optimizer._set_current_context(shard.home.device_id)
            self._optimizer._index_update_count[number] = facts["num_update"]
        self._optimizer.num_update = facts["num_update"]
        if self._optimizer.lr_scheduler is None:
            self._optimizer.lr = facts["learning_rate"]
        self._head.step = facts["step"]
        self._head.criterion.state.update(facts["criterion"])

    def _ensure_states(self) -> None:
        for number, shard in enumerate(self._head.store.shards):
            if number not in self._updater.states:
                state = self._optimizer.create_state_multi_precision(number, shard.weight)
                self._updater.states[number] = state
                self._updater.states_synced[number] = True


def _as_tuple(state) -> tuple[nd.NDArray, ...]:
    if state is None:
        return ()
    return state if isinstance(state, tuple) else (state,)
