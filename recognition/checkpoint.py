"""Saving and loading the training state, which is the same for any number of devices or processes.

A state is written under a temporary name and renamed when all of it is on disk, so that it is
complete or absent. `states` says what its folder holds and checks it.
"""

from __future__ import annotations

import math
import os
from typing import Any, Iterator, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import nd

from dsoftmax.losses.head import Head
from dsoftmax.recognition.common.arrays import (
    Blocks,
    load_arrays,
    map_npy,
    size_of,
    write_arrays,
    write_npy,
)
from dsoftmax.recognition.common.distributed.group import ALONE, Group
from dsoftmax.recognition.common.files import atomic_folder, explain_full_disk
from dsoftmax.recognition.states import (
    StateWriter,
    choose_state,
    is_whole,
    path_of,
    read_facts,
    set_aside,
    shape_of_classes,
    sync_folder,
)
from dsoftmax.recognition.trained import Trained, diverged_classes


class State(NamedTuple):
    """What a state consists of, ready to be written.

    Attributes
    ----------
    path : str
    classes : Blocks
        The class weights, (K, D).
    arrays : dict of str to dict
        The other files by name; each holds arrays by name.
    facts : dict
    """

    path: str
    classes: Blocks
    arrays: dict[str, dict[str, Any]]
    facts: dict[str, Any]

    @property
    def size(self) -> int:
        """The bytes it takes on disk, and in memory as a copy."""
        return 4 * math.prod(self.classes.shape) + sum(map(size_of, self.arrays.values()))

    def copy(self) -> State:
        """Return the same state in memory that training does not change."""
        classes = _copy(self.classes)  # first, in the order in which other processes assist
        arrays = {
            file: {name: _copy(array) for name, array in content.items()}
            for file, content in self.arrays.items()
        }
        return self._replace(classes=classes, arrays=arrays)

    def write(self) -> None:
        """Write the state; it is complete or absent."""
        folder = os.path.dirname(self.path)
        os.makedirs(folder, exist_ok=True)
        if os.path.exists(self.path):
            set_aside(self.path)
        with explain_full_disk(self.path, self.size), atomic_folder(self.path) as part:
            writer = StateWriter(part)
            with writer.file("classes.npy") as file:
                write_npy(file, self.classes)
            for name, content in self.arrays.items():
                with writer.file(name) as file:
                    write_arrays(file, content)
            writer.describe(self.facts)
        sync_folder(folder)


def _copy(array: nd.NDArray | np.ndarray | Blocks) -> np.ndarray | Blocks:
    if isinstance(array, nd.NDArray):
        return array.asnumpy()
    if not isinstance(array, Blocks):
        return array.copy()
    copy, start = np.empty(array.shape, array.dtype), 0
    for part in array.parts:
        copy[start : start + len(part)] = part
        start += len(part)
    return Blocks(array.shape, [copy] if len(copy) else [])


def save_state(
    folder: str, step: int, trained: Trained, facts: dict[str, Any], group: Group = ALONE
) -> str:
    """Save the state after `step` steps, as `collect_state` takes it; return its path."""
    state = collect_state(folder, step, trained, facts, group)
    if state:
        state.write()
    return path_of(folder, step)


def collect_state(
    folder: str, step: int, trained: Trained, facts: dict[str, Any], group: Group = ALONE
) -> State | None:
    """Return the state after `step` steps; None if it is saved already, or not by this process.

    Its arrays are those that training changes, and its blocks are read while they are written or
    copied: do that before the next step.

    Parameters
    ----------
    folder : str
        The folder of all states of the run.
    step : int
    trained : Trained
    facts : dict
        Anything else to save; JSON must be able to hold it, and `read_facts` returns it.
    group : Group
        All of its processes must call this. The first one writes.
    """
    path = path_of(folder, step)
    if group.gather_json("is saved", group.is_first and is_whole(path))[0]:
        return None
    nd.waitall()  # the backward pass writes moving averages
    parameters = trained.backbone.parameters()
    if not group.is_first:
        trained.head.store.assist_reading()
        trained.head_trainer.assist_reading()
        return None
    head = trained.head
    arrays = {
        "backbone.params": parameters,
        "momenta.params": trained.backbone.momenta() or {"none": nd.zeros(1)},
        "head.states": trained.head_trainer.states(),
    }
    shape = {
        "num_classes": head.num_classes,
        "embedding_size": head.embedding_size,
        "subcentres": head.store.subcentres,
    }
    classes = Blocks(head.store.shape, _finite_blocks(head, step))
    return State(path, classes, arrays, {"step": step, **shape, **facts})


def _finite_blocks(head: Head, step: int) -> Iterator[np.ndarray]:
    """Yield class weights block by block: there may be no room for all of them twice."""
    for block in head.store.blocks():
        if not np.isfinite(block).all():
            raise diverged_classes(step)
        yield block


class Resumed(NamedTuple):
    """The state a run goes on from.

    Attributes
    ----------
    path : str
    facts : dict
    notes : list of str
        Lines for the log.
    """

    path: str
    facts: dict[str, Any]
    notes: list[str]


def resume(folder: str, trained: Trained, group: Group = ALONE) -> Resumed | None:
    """Load the newest sound state; return None if there are no states at all.

    States are checked before anything is loaded. Damaged ones that are newer are kept under another
    name. All processes must call this; the first one checks and reads.
    """
    choice = group.gather_json("state", _choose(folder) if group.is_first else {})[0]
    if "refusal" in choice:
        raise ValueError(choice["refusal"])
    if choice["path"] is None:
        return None
    facts = load_state(choice["path"], trained, group)
    notes = choice["notes"]
    for path, problem in choice["damaged"]:
        if group.is_first:
            kept = os.path.basename(set_aside(path))
            notes.append(f"{path} is damaged ({problem}): it is kept as {kept}")
    return Resumed(choice["path"], facts, notes)


def _choose(folder: str) -> dict[str, Any]:
    """Choose a state, in a form that can be sent to other processes."""
    try:
        chosen, damaged = choose_state(folder)
    except (ValueError, OSError) as error:
        return {"refusal": str(error)}
    notes = []
    if chosen and not chosen.has_checksums:
        notes.append(f"{chosen.path} has no checksums: only sizes were checked")
    return {
        "path": chosen and chosen.path,
        "damaged": [(check.path, str(check.problems[0])) for check in damaged],
        "notes": notes,
    }


def load_state(path: str, trained: Trained, group: Group = ALONE) -> dict[str, Any]:
    """Load a state into the network and the head, on any number of devices; return its facts.

    All processes must call this; the first one reads the files.
    """
    facts = group.gather_json("facts", read_facts(path) if group.is_first else {})[0]
    shape, expected = shape_of_classes(facts), trained.head.store.shape
    if shape != expected:
        raise ValueError(
            f"{path}: the state has {shape[0]} class weights of width {shape[1]}, this run has "
            f"{expected[0]} of width {expected[1]}"
        )
    parameters, momenta, classes = {}, {}, None
    if group.is_first:
        parameters = load_arrays(os.path.join(path, "backbone.params"))
        momenta = load_arrays(os.path.join(path, "momenta.params"))
        momenta.pop("none", None)
        classes = map_npy(os.path.join(path, "classes.npy"))
    try:
        trained.backbone.load_parameters(broadcast(group, "parameters", parameters))
        trained.backbone.load_momenta(broadcast(group, "momenta", momenta))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    trained.head.load_class_weights(classes)
    trained.head_trainer.load_states(os.path.join(path, "head.states"))
    mx.nd.waitall()
    return facts


def broadcast(group: Group, name: str, arrays: dict[str, nd.NDArray]) -> dict[str, nd.NDArray]:
    """Return the first process's arrays."""
    if group.size == 1:
        return arrays
    received = group.broadcast(name, {key: array.asnumpy() for key, array in arrays.items()})
    return {key: nd.array(array, dtype=array.dtype) for key, array in received.items()}
