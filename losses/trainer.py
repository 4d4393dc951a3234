"""Updates of the class weights, with the interface of a ``gluon.Trainer``."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Iterator

import mxnet as mx
import numpy as np
from mxnet import nd

from dsoftmax.losses.kernels import RowGradient, Sgd, Workspace, set_rows, take_rows
from dsoftmax.recognition.common.arrays import Blocks, save_arrays

if TYPE_CHECKING:
    from dsoftmax.losses.head import Head

# Why some of MXNet's optimizers can't update class weights block by block.
REFUSED_OPTIMIZERS = {
    "dcasgd": "it keeps one copy of each whole array",
    "groupadagrad": "it takes sparse gradients of whole arrays alone",
    "lamb": "its steps depend on the norm of the whole array",
    "lars": "its steps depend on the norm of the whole array",
    "lbsgd": "its steps depend on the norm of the whole array",
    "nadam": "its schedule counts the calls, one per block",
    "sgld": "its noise would depend on how the classes are split",
}

SAMPLER = "sampler_"  # how the names of the sampler's saved arrays begin


class StaleGradientError(RuntimeError):
    """A step without a backward pass since the last one."""


class HeadTrainer:
    """Applies an MXNet optimizer to the class weights of a head.

    Any element-wise optimizer works, your own included; `REFUSED_OPTIMIZERS` are not. With sampled
    classes only the rows in use are updated. Momentum and weight decay of the others wait until
    they are used again: this *lazy* update is not the dense one, and the same wherever the weights
    live.

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
        if name in REFUSED_OPTIMIZERS:
            raise ValueError(
                f"{name} can't update class weights, which is done block by block: "
                f"{REFUSED_OPTIMIZERS[name]}; choose another one, such as sgd, adam or adagrad"
            )
        self._optimizer = optimizer
        self._scale = optimizer.rescale_grad
        self._updates = optimizer.begin_num_update
        self._states: list = []  # one a shard, as the optimizer makes it
        self._workspaces = [Workspace(shard.home) for shard in head.store.shards]

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
        self._update_all(gradients)
        self._updates += 1

    def _update_all(self, gradients: Iterator[tuple[int, slice | np.ndarray, RowGradient]]) -> None:
        """Update the weights by the gradients of a batch."""
        self._ensure_states()
        for number, rows, gradient in gradients:
            self._update(number, rows, gradient)

    def _update(self, number: int, rows: slice | np.ndarray, gradient: RowGradient) -> None:
        """Update rows of a shard."""
        shard, state = self._head.store.shards[number], self._states[number]
        weight = shard.weight
        if isinstance(rows, slice):
            weight, state, rows = weight[rows], _rows_of(state, rows), None
        if shard.home != shard.device:
            gradient = RowGradient(gradient.whole().as_in_context(shard.home))
        # MXNet counts the updates by device and array. Here a step is one, for every block.
        self._optimizer._set_current_context(0)
        self._optimizer._index_update_count[number] = self._updates
        if type(self._optimizer) is mx.optimizer.SGD:
            self._optimizer._update_count(number)
            self._sgd(number).update(weight, state, rows, gradient, self._workspaces[number])
        elif rows is None:
            self._optimizer.update(number, weight, gradient.whole(), state)
        else:
            self._update_rows(number, weight, state, rows, gradient.whole())

    def _update_rows(self, number: int, weight, state, rows: np.ndarray, gradient) -> None:
        """Update some rows by the optimizer's dense update of a copy of them.

        MXNet's own updates of single rows exist for few optimizers, and some of those (``ftrl``)
        silently update all rows.
        """
        arrays = (weight, *_as_tuple(state))
        copies = [take_rows(array, rows) for array in arrays]
        of_copies = tuple(copies[1:]) if isinstance(state, tuple) else (copies[1:] or [None])[0]
        self._optimizer.update(number, copies[0], gradient, of_copies)
        for array, copied in zip(arrays, copies):
            set_rows(array, rows, copied)

    def _sgd(self, number: int) -> Sgd:
        optimizer = self._optimizer
        return Sgd(
            lr=optimizer._get_lr(number),
            momentum=optimizer.momentum,
            wd=optimizer._get_wd(number),
            rescale_grad=optimizer.rescale_grad,
            clip_gradient=optimizer.clip_gradient,
        )

    def save_states(self, path: str) -> None:
        """Save the state of optimizer, criterion and sampler, independent of the devices.

        Of several processes, which must all call it, the first writes the file.
        """
        store = self._head.store
        if store.group.is_first:
            save_arrays(path, self.states())
        elif store.reads_together:
            for parts in self._read_states():
                for _ in parts:
                    pass

    def states(self) -> dict[str, Any]:
        """Return what `save_states` saves, by name: arrays, and `Blocks` where they are (K, D).

        Of several processes the others must call `save_states` while the first reads the blocks.
        """
        store = self._head.store
        content: dict[str, Any] = {
            f"state{place}": Blocks(store.shape, parts)
            for place, parts in enumerate(self._read_states())
        }
        for name, array in self._head.sampler.state.items():
            content[SAMPLER + name] = array
        facts = {
            "optimizer": type(self._optimizer).__name__,
            "num_update": self._updates,
            "learning_rate": self._optimizer.lr,
            "step": self._head.step,
            "criterion": self._head.criterion.state,
        }
        content["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        return content

    def load_states(self, path: str) -> None:
        """Load what `save_states` saved, on any number of devices.

        Of several processes, which must all call it, the first reads the file.
        """
        group = self._head.store.group
        facts, arrays, sampler_state = self._read_file(path) if group.is_first else ({}, [], {})
        facts = group.gather_json("facts", facts)[0]
        self._write_states(arrays)
        self._updates = self._optimizer.num_update = facts["num_update"]
        if self._optimizer.lr_scheduler is None:
            self._optimizer.lr = facts["learning_rate"]
        self._head.step = facts["step"]
        self._head.criterion.state.update(facts["criterion"])
        self._head.sampler.load_state(group.broadcast("sampler", sampler_state))

    def _read_file(self, path: str) -> tuple[dict, list[np.ndarray], dict[str, np.ndarray]]:
        """Return the facts, the optimizer's arrays (K, D) and the sampler's, of a file."""
        content = nd.load(os.fspath(path))
        if not isinstance(content, dict) or "facts" not in content:
            raise ValueError(f"{path}: no state of a head's trainer")
        facts = json.loads(content.pop("facts").asnumpy().tobytes())
        if facts["optimizer"] != type(self._optimizer).__name__:
            raise ValueError(
                f"{path}: the state is {facts['optimizer']}'s, not "
                f"{type(self._optimizer).__name__}'s"
            )
        of_sampler = [name for name in content if name.startswith(SAMPLER)]
        sampler_state = {name[len(SAMPLER) :]: content.pop(name).asnumpy() for name in of_sampler}
        arrays = [content[f"state{place}"].asnumpy() for place in range(len(content))]
        if len(arrays) != self._number_of_states() or any(
            len(array) != self._head.num_classes for array in arrays
        ):
            raise ValueError(
                f"{path}: the state is not that of {self._head.num_classes} classes with these "
                "options of the optimizer"
            )
        return facts, arrays, sampler_state

    def _number_of_states(self) -> int:
        """Count the arrays that the optimizer keeps of each array of weights."""
        some = nd.zeros((1, self._head.embedding_size))
        return len(_as_tuple(self._optimizer.create_state(0, some)))

    def _read_states(self) -> list[Iterator[np.ndarray]]:
        """Return what the optimizer keeps, each as the blocks (some, D) of an array (K, D)."""
        self._ensure_states()
        blocks = self._head.store.blocks
        return [blocks(list(parts)) for parts in zip(*map(_as_tuple, self._states))]

    def _write_states(self, arrays: list[np.ndarray]) -> None:
        """Set what the optimizer keeps; the first process has the arrays."""
        self._ensure_states()
        for place, parts in enumerate(zip(*map(_as_tuple, self._states))):
            self._head.store.fill(arrays[place] if arrays else None, parts)

    def _ensure_states(self) -> None:
        if not self._states:
            self._states = [
                self._optimizer.create_state(number, shard.weight)
                for number, shard in enumerate(self._head.store.shards)
            ]


def _as_tuple(state) -> tuple[nd.NDArray, ...]:
    if state is None:
        return ()
    return state if isinstance(state, tuple) else (state,)


def _rows_of(state, rows: slice):
    if isinstance(state, tuple):
        return tuple(part[rows] for part in state)
    return None if state is None else state[rows]
