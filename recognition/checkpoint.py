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


def save_state(
    folder: str, step: int, trained: Trained, facts: dict[str, Any], group: Group = ALONE
) -> str:
    """Save the state after `step` steps; return its path.

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
        return path
    nd.waitall()  # the backward pass writes moving averages
    parameters = trained.backbone.parameters()
    if not group.is_first:
        trained.head.store.assist_reading()
        trained.head_trainer.assist_reading()
        return path
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(path):
        set_aside(path)
    arrays = {
        "backbone.params": parameters,
        "momenta.params": trained.backbone.momenta() or {"none": nd.zeros(1)},
        "head.states": trained.head_trainer.states(),
    }
    needed = 4 * math.prod(trained.head.store.shape)
    needed += sum(map(size_of, arrays.values()))
    with explain_full_disk(path, needed), atomic_folder(path) as part:
        writer = StateWriter(part)
        with writer.file("classes.npy") as file:
            write_npy(file, Blocks(trained.head.store.shape, _finite_blocks(trained.head, step)))
        for name, content in arrays.items():
            with writer.file(name) as file:
                write_arrays(file, content)
        shape = {
            "num_classes": trained.head.num_classes,
            "embedding_size": trained.head.embedding_size,
            "subcentres": trained.head.store.subcentres,
        }
        writer.describe({"step": step, **shape, **facts})
    sync_folder(folder)
    return path


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
