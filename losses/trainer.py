"""Updates of the class weights, with the interface of a ``gluon.Trainer``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import nd

from dsoftmax.losses.kernels import RowGradient, Sgd, Workspace, copied_rows
from dsoftmax.losses.stores.base import state_name
from dsoftmax.losses.update import StaleGradientError
from dsoftmax.recognition.common.arrays import Blocks, map_arrays, save_arrays

if TYPE_CHECKING:
    from dsoftmax.losses.head import Head

# MXNet's optimizers that can't update class weights block by block, and why.
REFUSED_OPTIMIZERS = {
    "dcasgd": "it keeps one copy of each whole array",
    "groupadagrad": "it only takes sparse gradients of whole arrays",
    "lamb": "its steps depend on the norm of the whole array",
    "lars": "its steps depend on the norm of the whole array",
    "lbsgd": "its steps depend on the norm of the whole array",
    "nadam": "its schedule counts the calls, one per block",
    "sgld": "its noise would depend on how the classes are split",
}

FACTS = "facts"  # the name of what is saved as JSON
SAMPLER = "sampler_"  # how the names of the sampler's saved arrays begin


class SavedStates(NamedTuple):
    """What `HeadTrainer.save_states` saves.

    Attributes
    ----------
    facts : dict
        Numbers of optimizer, head and criterion.
    arrays : dict of str to (K, D)
        The optimizer's states, by the names that stores have for them.
    sampler : dict of str to array
        The sampler's state.
    """

    facts: dict[str, Any]
    arrays: dict[str, Any]
    sampler: dict[str, np.ndarray]

    def content(self) -> dict[str, Any]:
        """Return the arrays to write to a file, by name."""
        sampler = {SAMPLER + name: array for name, array in self.sampler.items()}
        facts = np.frombuffer(json.dumps(self.facts).encode(), np.uint8)
        return {**self.arrays, **sampler, FACTS: facts}


def read_states(path: str) -> SavedStates:
    """Read what `HeadTrainer.save_states` saved; the optimizer's arrays are views of the file."""
    content = map_arrays(path)  # memory may hold the optimizer's arrays once, not twice
    if FACTS not in content:
        raise ValueError(f"{path}: not the state of a head's trainer")
    try:
        facts = json.loads(content.pop(FACTS).tobytes())
    except ValueError as error:
        raise ValueError(f"{path}: its facts are no JSON ({error})") from None
    of_sampler = [name for name in content if name.startswith(SAMPLER)]
    sampler = {name[len(SAMPLER) :]: np.array(content.pop(name)) for name in of_sampler}
    return SavedStates(facts, content, sampler)


class HeadTrainer:
    """Applies an MXNet optimizer to the class weights of a head.

    Any element-wise optimizer works, your own included; `REFUSED_OPTIMIZERS` don't. With sampled
    classes only the class rows in use are updated. Momentum and weight decay of the others wait
    until they are used again: this *lazy* update differs from the dense one, and is the same
    wherever the weights live.

    Parameters
    ----------
    head : Head
    optimizer : str or mx.optimizer.Optimizer
    optimizer_params : dict
        As for ``gluon.Trainer``.
    """

    def __init__(self, head: Head, optimizer, optimizer_params: dict):
        self._head = head
        if isinstance(optimizer, str):
            optimizer = mx.optimizer.create(optimizer, **optimizer_params)
        elif optimizer_params:
            raise ValueError("optimizer_params must be empty for an optimizer that exists already")
        name = type(optimizer).__name__.lower()
        if name in REFUSED_OPTIMIZERS:
            raise ValueError(
                f"{name} can't update class weights, which is done block by block: "
                f"{REFUSED_OPTIMIZERS[name]}; choose another one, such as sgd, adam or adagrad"
            )
        self._optimizer = optimizer
        self._scale = optimizer.rescale_grad
        self._updates = optimizer.begin_num_update
        self._states: list = []  # one per shard, as the optimizer makes it
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
        """Set the learning rate of the next steps."""
        self._optimizer.set_learning_rate(lr)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Update the class weights by the gradients of the last backward pass, or of an update.

        Parameters
        ----------
        batch_size : int
            Gradients are divided by it. For several micro-batches, give the samples of all.
        ignore_stale_grad : bool
            Do nothing, instead of raising, if there was no backward pass since the last step.

        Raises
        ------
        ValueError
            A loss or an embedding is not finite. Nothing has been updated, and the update is given
            up.
        """
        try:
            gradients = self._head.take_gradients()
        except StaleGradientError:
            if ignore_stale_grad:
                return
            raise
        self._optimizer.rescale_grad = self._scale / batch_size
        self._update_all(gradients)
        self._learn()
        self._updates += 1

    def _learn(self) -> None:
        """Update the learned numbers of the criterion, which every process has."""
        optimizer = self._optimizer
        gradients = self._head.learned_gradients()
        scaled = {name: optimizer.rescale_grad * grad for name, grad in gradients.items()}
        momentum = getattr(optimizer, "momentum", 0.0)
        self._head.criterion.learn(scaled, self.learning_rate, momentum)

    def _update_all(self, gradients: Iterator[tuple[int, slice | np.ndarray, RowGradient]]) -> None:
        """Update the weights by the gradients of a step."""
        self._ensure_states()
        for number, class_rows, gradient in gradients:
            self._update(number, class_rows, gradient)

    def _update(self, number: int, class_rows: slice | np.ndarray, gradient: RowGradient) -> None:
        """Update class rows of a shard."""
        shard, state = self._head.store.shards[number], self._states[number]
        weight = shard.weight
        if isinstance(class_rows, slice):
            weight, state = weight[class_rows], _slice_of(state, class_rows)
            class_rows = None
        if shard.home != shard.device:
            gradient = RowGradient(gradient.whole().as_in_context(shard.home))
        self._count_update(number)
        if type(self._optimizer) is mx.optimizer.SGD:
            self._optimizer._update_count(number)
            self._sgd(number).update(weight, state, class_rows, gradient, self._workspaces[number])
        elif class_rows is None:
            self._optimizer.update(number, weight, gradient.whole(), state)
        else:
            self._update_some(number, weight, state, class_rows, gradient.whole())

    def _count_update(self, number: int) -> None:
        """Tell the optimizer which update comes next.

        MXNet counts the updates by device and array. Here a step is one, for every block.
        """
        self._optimizer._set_current_context(0)
        self._optimizer._index_update_count[number] = self._updates

    def _update_some(self, number: int, weight, state, class_rows: np.ndarray, gradient) -> None:
        """Update some class rows by the optimizer's dense update of a copy of them."""
        arrays = [weight, *_as_tuple(state)]
        with copied_rows(arrays, class_rows, self._workspaces[number]) as copies:
            of_copies = tuple(copies[1:]) if isinstance(state, tuple) else (copies[1:] or [None])[0]
            self._optimizer.update(number, copies[0], gradient, of_copies)

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

        All processes must call it; the first writes the file.
        """
        if self._head.store.group.is_first:
            save_arrays(path, self.states())
        else:
            self.assist_reading()

    def assist_reading(self) -> None:
        """Do this process's part while the first one reads the blocks of `states`."""
        for name in self._state_names():
            self._head.store.assist_reading(name)

    def states(self) -> dict[str, Any]:
        """Return what `save_states` saves, by name: arrays, and `Blocks` for those of shape (K, D).

        The other processes must call `assist_reading` while the first one reads the blocks.
        """
        store = self._head.store
        arrays = {name: Blocks(store.shape, store.blocks(name)) for name in self._state_names()}
        facts = {
            "optimizer": type(self._optimizer).__name__,
            "num_update": self._updates,
            "learning_rate": self._optimizer.lr,
            "step": self._head.step,
            "criterion": self._head.criterion.read_state(),
        }
        return SavedStates(facts, arrays, self._head.sampler.state).content()

    def load_states(self, path: str) -> None:
        """Load what `save_states` saved, on any number of devices.

        All processes must call it; the first reads the file.
        """
        store, group = self._head.store, self._head.store.group
        saved = self._read_file(path) if group.is_first else SavedStates({}, {}, {})
        facts = group.gather_json("facts", saved.facts)[0]
        for name in self._state_names():
            store.fill(saved.arrays.get(name), name)
        self._updates = self._optimizer.num_update = facts["num_update"]
        if self._optimizer.lr_scheduler is None:
            self._optimizer.lr = facts["learning_rate"]
        self._head.step = facts["step"]
        self._head.criterion.state.update(facts["criterion"])
        self._head.sampler.load_state(group.broadcast("sampler", saved.sampler))

    def _read_file(self, path: str) -> SavedStates:
        """Read a file, and refuse one that another head or optimizer has saved."""
        saved = read_states(path)
        if saved.facts["optimizer"] != type(self._optimizer).__name__:
            raise ValueError(
                f"{path}: the state is {saved.facts['optimizer']}'s, not "
                f"{type(self._optimizer).__name__}'s"
            )
        if set(saved.arrays) != set(self._state_names()) or any(
            len(array) != self._head.store.shape[0] for array in saved.arrays.values()
        ):
            raise ValueError(
                f"{path}: the state is not that of {self._head.num_classes} classes with these "
                "options of the optimizer"
            )
        return saved

    def _state_names(self) -> list[str]:
        """Return the names under which the store keeps the states of the optimizer."""
        self._keep_states()
        example = nd.zeros((1, self._head.embedding_size))
        count = len(_as_tuple(self._optimizer.create_state(0, example)))
        return [state_name(place) for place in range(count)]

    def _ensure_states(self) -> None:
        """Have the optimizer make its states, if it has not yet."""
        if not self._states:
            self._states = [
                self._optimizer.create_state(number, shard.weight)
                for number, shard in enumerate(self._head.store.shards)
            ]

    def _keep_states(self) -> None:
        """Let the store read and write the states by name, instead of another trainer's."""
        self._ensure_states()
        for place, parts in enumerate(zip(*map(_as_tuple, self._states))):
            self._head.store.keep(state_name(place), list(parts))


def _as_tuple(state) -> tuple[nd.NDArray, ...]:
    if state is None:
        return ()
    return state if isinstance(state, tuple) else (state,)


def _slice_of(state, class_rows: slice):
    if isinstance(state, tuple):
        return tuple(part[class_rows] for part in state)
    return None if state is None else state[class_rows]
