"""What one does to the classes of a trained model: show, take out, put in, add, drop, join.

Each function reads a state and writes one to the folder of another run, from which
``train.py --resume`` goes on.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any, NamedTuple

import numpy as np

from dsoftmax.eval.models import Embed, load_model
from dsoftmax.losses.stores.base import WEIGHT
from dsoftmax.recognition import networks
from dsoftmax.recognition.class_edits import (
    ClassArrays,
    LabelMap,
    closest_pairs,
    dropping,
    join,
    lengths,
    merging,
    rearrange,
)
from dsoftmax.recognition.class_files import open_class_weights, open_momenta
from dsoftmax.recognition.class_means import mean_directions
from dsoftmax.recognition.class_states import (
    ClassState,
    describe_head,
    read_class_state,
    write_class_state,
)
from dsoftmax.recognition.common.arrays import Blocks, load_arrays, write_npy
from dsoftmax.recognition.common.files import AtomicFile, explain_full_disk
from dsoftmax.recognition.common.rows import Rows
from dsoftmax.recognition.data.identities import match_names, read_label_map, write_table
from dsoftmax.recognition.data.records import Records
from dsoftmax.recognition.networks.files import save_model
from dsoftmax.recognition.states import list_states

COMPARED = 20_000  # classes of which all pairs are compared in seconds
LABELS = "labels.csv"  # beside a state: which label became which


class Written(NamedTuple):
    """A state that was written, and its number of classes and their width."""

    path: str
    shape: tuple[int, int]


def show(folder: str, pairs: int = 10, all_pairs: bool = False) -> dict[str, Any]:
    """Describe the classes of a state, as values for JSON.

    Parameters
    ----------
    folder : str
        Of a run or a state.
    pairs : int
        How many of the closest pairs to list.
    all_pairs : bool
        Compare all classes, however long that takes, instead of `COMPARED` drawn ones.
    """
    state = read_class_state(folder)
    weights = state.classes[WEIGHT]
    compared = np.arange(len(weights))
    if len(weights) > COMPARED and not all_pairs:
        compared = np.sort(np.random.default_rng(0).choice(len(weights), COMPARED, replace=False))
    return {
        "path": state.path,
        "classes": weights.shape[0],
        "width": weights.shape[1],
        "dtype": "float32",
        **describe_head(state),
        "lengths": _summary(lengths(weights)),
        "momenta": {
            name: _summary(lengths(rows)) for name, rows in state.classes.items() if name != WEIGHT
        },
        "compared": len(compared),
        "closest": [pair._asdict() for pair in closest_pairs(weights, pairs, compared)],
    }


def _summary(values: np.ndarray) -> dict[str, float]:
    return {
        "min": float(values.min()),
        "median": float(np.median(values)),
        "mean": float(values.mean()),
        "max": float(values.max()),
        "zeros": int(np.count_nonzero(values == 0)),
    }


def export(source: str, output: str, momenta: str | None = None) -> tuple[int, int]:
    """Write class weights to a ``.npy`` file, (K, D); return their shape.

    Parameters
    ----------
    source : str
        Anything that `open_class_weights` reads.
    output : str
    momenta : str, optional
        A second file for the states of the optimizer, (S, K, D); `source` must be a state or a run.
    """
    if momenta:
        state = read_class_state(source)
        weights = state.classes[WEIGHT]
        states = [rows for name, rows in sorted(state.classes.items()) if name != WEIGHT]
        if not states:
            raise ValueError(f"{state.path}: its optimizer has no momenta")
    else:
        weights, states = open_class_weights(source), []
    _save(output, weights.shape, [weights])
    if states:
        _save(momenta, (len(states), *weights.shape), states)
    return weights.shape


def _save(path: str, shape: tuple[int, ...], arrays: list[Rows]) -> None:
    parts = (block for rows in arrays for block in rows.blocks())
    with explain_full_disk(path), AtomicFile(path) as file:
        write_npy(file, Blocks(shape, parts))


def replace(
    folder: str,
    weights: str,
    output: str,
    momenta: str | None = None,
    num_classes: int | None = None,
) -> Written:
    """Put class weights of a file into a state; its momenta are those of another file, or 0.

    Parameters
    ----------
    folder : str
        Of a run or a state, whose network and step are taken.
    weights : str
        Anything that `open_class_weights` reads.
    output : str
    momenta : str, optional
    num_classes : int, optional
        Cuts off classes that insightface has added to fill the last device up.
    """
    state = _open(folder, output)
    rows = open_class_weights(weights, num_classes)
    if rows.shape[1] != state.shape[1]:
        raise ValueError(
            f"{weights}: class weights of width {rows.shape[1]}, the state has width "
            f"{state.shape[1]}"
        )
    names = sorted(name for name in state.classes if name != WEIGHT)
    zeros = Rows([np.broadcast_to(np.float32(0), rows.shape)])
    states = open_momenta(momenta, len(rows)) if momenta else [zeros] * len(names)
    if [one.shape for one in states] != [rows.shape] * len(names):
        raise ValueError(
            f"{momenta}: {len(states)} momenta of shape {states[0].shape}, where the state's "
            f"optimizer has {len(names)} of shape {rows.shape}"
        )
    classes = {WEIGHT: rows, **dict(zip(names, states))}
    is_other_data = len(rows) != state.shape[0]
    return _written(state, classes, output, is_other_data)


def add(
    folder: str, dataset: str, output: str, model: str | None = None, threads: int = 2
) -> Written:
    """Add the people of a dataset whose labels come after the state's classes.

    Their weights have the directions of the mean embeddings of their images, and the median length
    of the old weights: the larger a weight, the less a gradient turns it, and weight decay acts on
    its length. So new classes learn as fast as old ones.

    Parameters
    ----------
    folder : str
        Of a run or a state.
    dataset : str
        With old and new people, as ``train.py`` will read it.
    output : str
    model : str, optional
        ``prefix,epoch`` of the network that makes the embeddings; by default the state's own.
    threads : int
        Decoding threads.
    """
    state = _open(folder, output)
    _refuse_filtered(state)
    records = Records(dataset)
    if records.num_classes <= state.shape[0]:
        raise ValueError(
            f"{dataset} has {records.num_classes} classes, and {state.path} {state.shape[0]}: "
            "there is nobody to add; the dataset must hold old and new people, the new ones with "
            "the next labels, as dir2rec numbers them"
        )
    new = np.arange(state.shape[0], records.num_classes)
    added = _weights_of(state, records, new, model, threads)
    same = np.arange(state.shape[0])
    classes = rearrange(state.classes, LabelMap.of(same, same), added)
    return _written(state, classes, output, is_other_data=True)


def drop(folder: str, classes: np.ndarray, output: str) -> Written:
    """Leave classes out and number the others without gaps."""
    state = _open(folder, output)
    return _relabelled(state, dropping(state.shape[0], classes), output)


def merge(
    folder: str, classes: np.ndarray, output: str, shares: np.ndarray | None = None
) -> Written:
    """Make some classes one, under the lowest of their labels; see `rearrange`."""
    if shares is not None and len(shares) != len(classes):
        raise ValueError(f"{len(shares)} shares for {len(classes)} classes: give one for each")
    state = _open(folder, output)
    return _relabelled(state, merging(state.shape[0], classes, shares), output)


def remap(
    folder: str,
    dataset: str,
    output: str,
    label_map: str | None = None,
    of_set: str | None = None,
    old_dataset: str | None = None,
    model: str | None = None,
    threads: int = 2,
) -> Written:
    """Give classes the labels of another dataset; drop people it does not have.

    People that the state has no class for get weights as by `add`.

    Parameters
    ----------
    folder : str
        Of a run or a state.
    dataset : str
        The new dataset.
    output : str
    label_map : str, optional
        A csv file with the columns ``old_label`` and ``label``; by default the ``identities.csv``
        of the new dataset, which ``rec_merge`` has written.
    of_set : str, optional
        The old dataset, as that file calls it.
    old_dataset : str, optional
        The old dataset: labels are matched by the names in ``identities.csv`` of both instead.
    model : str, optional
    threads : int
    """
    state = _open(folder, output)
    _refuse_filtered(state)
    records = Records(dataset)
    inside = os.path.dirname(records.path)
    if old_dataset:
        found = match_names(os.path.dirname(Records(old_dataset).path), inside)
    else:
        found = read_label_map(label_map or os.path.join(inside, "identities.csv"), of_set)
    if not found:
        raise ValueError(f"{dataset}: none of its people is one of {state.path}")
    labels = LabelMap.of(*zip(*found))
    if labels.new.max() >= records.num_classes:
        raise ValueError(
            f"{dataset} has {records.num_classes} classes, and no label {labels.new.max()}"
        )
    new = np.setdiff1d(np.arange(records.num_classes), labels.new)
    added = _weights_of(state, records, new, model, threads) if len(new) else {}
    return _relabelled(state, labels, output, added)


def join_heads(folder: str, other: str, output: str) -> Written:
    """Put the classes of another head after those of a state, which keeps its network."""
    state, second = _open(folder, output), read_class_state(other)
    widths = [one.shape[1] for one in (state, second)]
    if widths[0] != widths[1]:
        raise ValueError(
            f"{state.path} has class weights of width {widths[0]}, {second.path} of width "
            f"{widths[1]}: heads of one width can be joined"
        )
    return _written(state, join(state.classes, second.classes), output, is_other_data=True)


def _relabelled(
    state: ClassState, labels: LabelMap, output: str, added: dict[int, np.ndarray] | None = None
) -> Written:
    written = _written(state, rearrange(state.classes, labels, added), output, is_other_data=True)
    table = zip(labels.old.tolist(), labels.new.tolist())
    write_table(os.path.join(output, LABELS), ("old_label", "label"), table)
    return written


def _open(folder: str, output: str) -> ClassState:
    """Open a state, unless its successor would have no place."""
    if list_states(os.path.join(output, "states")):
        raise FileExistsError(f"{output} holds the states of a run already: choose another one")
    return read_class_state(folder)


def _refuse_filtered(state: ClassState) -> None:
    """Refuse a run whose classes are not the labels of its dataset."""
    fewest = state.settings["images_filter"]
    if fewest > 1:
        raise ValueError(
            f"{state.path}: its run left out people by --images-filter {fewest} and numbered the "
            "others itself, so that labels of a dataset are not its classes; leave them out by "
            "dir2rec --min-images instead"
        )


def _written(state: ClassState, classes: ClassArrays, output: str, is_other_data: bool) -> Written:
    path = write_class_state(state, classes, output, is_other_data)
    return Written(path, classes[WEIGHT].shape)


def _weights_of(
    state: ClassState, records: Records, new: np.ndarray, model: str | None, threads: int
) -> dict[int, np.ndarray]:
    """Make the weights of new labels from the images of a dataset, (D,) by label."""
    settings = state.settings
    size = tuple(settings["image_size"] or records.image_size)
    embed = load_model(model) if model else network_of(state, size)
    images = np.flatnonzero(np.isin(records.labels, new))
    rows = np.searchsorted(new, records.labels[images])
    sums = np.zeros((len(new), state.shape[1]), np.float32)
    batch_size = settings["per_batch_size"]
    directions = mean_directions(embed, records, images, rows, sums, size, batch_size, threads)
    unseen = new[~directions.any(axis=1)]
    if len(unseen):
        raise ValueError(
            f"{records.path}: {len(unseen)} new classes have no readable image, {unseen[0]} is the "
            "first: their weights would be random; give them images, or number people anew"
        )
    weights = directions * np.median(lengths(state.classes[WEIGHT]))
    return dict(zip(new.tolist(), weights))


def network_of(state: ClassState, image_size: tuple[int, int]) -> Embed:
    """Return the network of a state as a function from images to embeddings."""
    settings = state.settings
    network = networks.create(
        settings["architecture"],
        settings["embedding_size"],
        image_size=image_size,
        **settings["network_options"],
    )
    parameters = load_arrays(os.path.join(state.path, "backbone.params"))
    with tempfile.TemporaryDirectory() as folder:
        prefix = os.path.join(folder, "model")
        save_model(network, prefix, 0, parameters)
        return load_model(f"{prefix},0")
