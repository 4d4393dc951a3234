"""Saved training states: whole or absent, and the same for any number of devices and processes.

A state is a folder ``states/state-<step>``, written under a temporary name and renamed when all of
it is on disk:

    backbone.params   the network's parameters, by name
    momenta.params    what its optimizer keeps of them
    classes.npy       all class weights, (K, D), however they were split
    head.states       momenta of the class weights, the sampler's and the criterion's state
    state.json        step, position in the epoch, best scores, and what it is a state of
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import nd

from dsoftmax.losses.groups import ALONE, Group
from dsoftmax.losses.head import Head
from dsoftmax.losses.trainer import HeadTrainer
from dsoftmax.recognition.backbone import Backbone
from dsoftmax.recognition.files import atomic_folder

FORMAT = 1
FILES = ("backbone.params", "momenta.params", "classes.npy", "head.states")
_NAME = re.compile(r"state-(\d{8,})")


class NotFiniteError(ValueError):
    """What was to be saved are no numbers any more."""


class Trained(NamedTuple):
    """What is trained, and by what."""

    backbone: Backbone
    head: Head
    head_trainer: HeadTrainer


def save_state(
    folder: str, step: int, trained: Trained, facts: dict[str, Any], group: Group = ALONE
) -> str:
    """Save the state after `step` steps; return its path.

    Parameters
    ----------
    folder : str
        Of all states of the run.
    step : int
    trained : Trained
    facts : dict
        What JSON can hold, to be given back by `read_facts`.
    group : Group
        The processes that must all call this. The first one writes.
    """
    path = os.path.join(folder, f"state-{step:08d}")
    if group.gather_json("is saved", group.is_first and _is_whole(path))[0]:
        return path
    nd.waitall()  # moving averages are written on the way backward
    parameters = trained.backbone.parameters()
    if not group.is_first:
        if trained.head.store.reads_together:
            _write_classes(os.devnull, trained.head)
        trained.head_trainer.save_states(os.devnull)
        return path
    os.makedirs(folder, exist_ok=True)
    shutil.rmtree(path, ignore_errors=True)  # damaged
    with atomic_folder(path) as part:
        backbone, momenta, classes, head = (os.path.join(part, name) for name in FILES)
        nd.save(backbone, parameters)
        nd.save(momenta, trained.backbone.momenta() or {"none": nd.zeros(1)})
        _write_classes(classes, trained.head)
        trained.head_trainer.save_states(head)
        sizes = {name: os.path.getsize(os.path.join(part, name)) for name in FILES}
        described = {
            "format": FORMAT,
            "step": step,
            "files": sizes,
            "num_classes": trained.head.num_classes,
            "embedding_size": trained.head.embedding_size,
            **facts,
        }
        with open(os.path.join(part, "state.json"), "w", encoding="utf-8") as file:
            json.dump(described, file, indent=2)
        for name in (*FILES, "state.json"):
            _sync(os.path.join(part, name))
        _sync(part)
    _sync(folder)
    return path


def _write_classes(path: str, head: Head) -> None:
    """Write class weights block by block: there may be no room for all of them twice."""
    with open(path, "wb") as file:
        header = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)),
            "fortran_order": False,
            "shape": (head.num_classes, head.embedding_size),
        }
        np.lib.format.write_array_header_1_0(file, header)
        for block in head.store.blocks():
            if not np.isfinite(block).all():
                raise NotFiniteError("class weights hold NaN or infinite numbers")
            block.tofile(file)


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_states(folder: str) -> list[str]:
    """Return the paths of all whole states, the newest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            match = _NAME.fullmatch(name)
            path = os.path.join(folder, name)
            if match and _is_whole(path):
                found.append((int(match.group(1)), path))
    return [path for _, path in sorted(found, reverse=True)]


def _is_whole(path: str) -> bool:
    try:
        sizes = read_facts(path)["files"]
        return all(os.path.getsize(os.path.join(path, name)) == sizes[name] for name in FILES)
    except (OSError, ValueError, KeyError):
        return False


def read_facts(path: str) -> dict[str, Any]:
    """Read what is said about a state."""
    with open(os.path.join(path, "state.json"), encoding="utf-8") as file:
        facts = json.load(file)
    if facts.get("format") != FORMAT:
        raise ValueError(f"{path}: a state of format {facts.get('format')}, this reads {FORMAT}")
    return facts


def load_state(path: str, trained: Trained, group: Group = ALONE) -> dict[str, Any]:
    """Load a state into what is trained, on any number of devices; return its facts.

    Of several processes, which must all call it, the first reads the files.
    """
    facts = group.gather_json("facts", read_facts(path) if group.is_first else {})[0]
    shape = (facts["num_classes"], facts["embedding_size"])
    if shape != trained.head.store.shape:
        raise ValueError(
            f"{path}: the state is of {shape[0]} classes of width {shape[1]}, this run has "
            f"{trained.head.store.shape[0]} of width {trained.head.store.shape[1]}"
        )
    parameters, momenta = ({}, {})
    classes = None
    if group.is_first:
        parameters = nd.load(os.path.join(path, "backbone.params"))
        momenta = nd.load(os.path.join(path, "momenta.params"))
        momenta.pop("none", None)
        classes = np.load(os.path.join(path, "classes.npy"), mmap_mode="r")
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


def prune_states(folder: str, keep: int) -> None:
    """Remove all but the newest `keep` whole states, and what killed runs left half-written."""
    kept = list_states(folder)[: max(keep, 1)]
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        is_ours = name.startswith("state-")
        if is_ours and path not in kept and os.path.isdir(path):
            # First it must not look whole any more: a kill may come in the middle.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, "state.json"))
            shutil.rmtree(path, ignore_errors=True)
