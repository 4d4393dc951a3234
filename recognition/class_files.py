"""Class weights in files: ours, insightface's and Partial FC's, by one reader.

- a folder of a run, of which the newest state is taken, or of a state
- ``.npy``: an array (K, D)
- ``model-0001.params``: ``arg:fc7_weight``; or ``fc7_0_weight``, ``fc7_1_weight``, …, which
  insightface's parallel module has, one per device
- a file of `Head.save_parameters`: ``class_weight``
- ``0_centers.param``, …, which Partial FC has, one per rank; or the folder they are in

insightface and Partial FC fill the last device or rank up with classes that do not exist: the
number of classes, where it is known, cuts them off.
"""

from __future__ import annotations

import math
import os
import re
from typing import Mapping

import numpy as np

from dsoftmax.recognition.common.arrays import load_arrays, map_list, map_npy
from dsoftmax.recognition.common.rows import Rows
from dsoftmax.recognition.states import find_sound_state

WEIGHTS, MOMENTA = "centers", "centers_mom"  # what Partial FC calls them
NAMES = ("fc7_weight", "class_weight")  # of whole arrays
_SHARD = re.compile(r"fc7_(\d+)_weight")
_CENTERS = re.compile(r"(\d+)_(centers|centers_mom)\.param")


def open_class_weights(path: str, num_classes: int | None = None) -> Rows:
    """Open class weights, (K, D), in any of the forms above.

    Parameters
    ----------
    path : str
    num_classes : int, optional
        K. Classes that insightface or Partial FC have added after these are left out.

    Raises
    ------
    ValueError
        There are no class weights, or not so many.
    """
    return as_rows(path, _find(path), num_classes)


def open_momenta(path: str, num_classes: int) -> list[Rows]:
    """Open the states of an optimizer, (K, D) each.

    Parameters
    ----------
    path : str
        A ``.npy`` file, (K, D) or (S, K, D) for S states; or Partial FC's ``0_centers_mom.param``,
        …, or the folder they are in.
    num_classes : int
        K.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: there is no such file or folder")
    if path.endswith(".npy"):
        array = map_npy(path)
        parts = [array] if array.ndim != 3 else [_part(array, place) for place in range(len(array))]
        return [as_rows(path, [part], num_classes) for part in parts]
    parts = _partial_fc(path, MOMENTA)
    if not parts:
        raise ValueError(
            f"{path}: momenta are a .npy file, as tools/classes.py export writes it, or the folder "
            "of Partial FC's 0_centers_mom.param"
        )
    return [as_rows(path, parts, num_classes)]


def class_weights_in_model(path: str) -> list[np.ndarray]:
    """Return the class weights in a parameter file: none, one array, or all shards in order."""
    arrays = _map_parameters(path)
    plain = {name.split(":", 1)[-1]: array for name, array in arrays.items()}
    for name in NAMES:
        if name in plain:
            return [plain[name]]
    shards = {
        int(match.group(1)): array
        for name, array in plain.items()
        if (match := _SHARD.fullmatch(name))
    }
    _check_numbers("fc7_<number>_weight", shards)
    return [shards[number] for number in range(len(shards))]


def _find(path: str) -> list[np.ndarray]:
    """Find the arrays that hold class weights, one after the other."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: there is no such file or folder")
    parts = _partial_fc(path, WEIGHTS)
    if parts:
        return parts
    if os.path.isdir(path):
        return [map_npy(os.path.join(_state_in(path), "classes.npy"))]
    if path.endswith(".npy"):
        return [map_npy(path)]
    parts = class_weights_in_model(path)
    if not parts:
        raise ValueError(
            f"{path}: there are no class weights in it: it has none of {', '.join(NAMES)} and "
            "fc7_0_weight, fc7_1_weight, …; models are saved without them unless the "
            "configuration says ckpt_embedding = False"
        )
    return parts


def _state_in(folder: str) -> str:
    try:
        return find_sound_state(folder)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder}: there are no class weights in it: it is no folder of a run or a state, and "
            "has no 0_centers.param of Partial FC"
        ) from None


def _partial_fc(path: str, kind: str) -> list[np.ndarray]:
    """Map the files of all of Partial FC's ranks; none if the path is no such file or folder."""
    match = _CENTERS.fullmatch(os.path.basename(path))
    if match and match.group(2) != kind:
        raise ValueError(f"{path}: these are Partial FC's {match.group(2)}, not its {kind}")
    if not (match or os.path.isdir(path)):
        return []
    folder = os.path.dirname(path) or "." if match else path
    found = {}
    for name in os.listdir(folder):
        match = _CENTERS.fullmatch(name)
        if match and match.group(2) == kind:
            _, arrays = map_list(os.path.join(folder, name))
            if len(arrays) != 1:
                raise ValueError(f"{folder}/{name}: {len(arrays)} arrays, Partial FC saves one")
            found[int(match.group(1))] = arrays[0]
    _check_numbers(f"{folder}/<rank>_{kind}.param", found)
    return [found[rank] for rank in range(len(found))]


def _check_numbers(what: str, found: Mapping[int, np.ndarray]) -> None:
    missing = sorted(set(range(max(found, default=-1) + 1)) - set(found))
    if missing:
        raise ValueError(
            f"{what}: number {missing[0]} is missing, although there is number {max(found)}: class "
            "weights need all of them"
        )


def _part(stacked: np.memmap, place: int) -> np.memmap:
    """Map one of the arrays (K, D) that a file (S, K, D) holds."""
    offset = stacked.offset + place * stacked.dtype.itemsize * math.prod(stacked.shape[1:])
    return np.memmap(stacked.filename, stacked.dtype, "r", offset, stacked.shape[1:])


def _map_parameters(path: str) -> dict[str, np.ndarray]:
    """Map the arrays of a parameter file, or load them if an MXNet before 1.0 has written it."""
    try:
        names, arrays = map_list(path)
    except ValueError:
        return {name: array.asnumpy() for name, array in load_arrays(path).items()}
    return dict(zip(names, arrays))


def as_rows(path: str, parts: list[np.ndarray], num_classes: int | None = None) -> Rows:
    """Check and join arrays of class weights; leave out what insightface has added at their end."""
    for part in parts:
        if part.ndim != 2 or part.dtype.kind != "f":
            raise ValueError(
                f"{path}: class weights are a float array (classes, width), not {part.dtype} "
                f"{part.shape}"
            )
    rows = Rows(parts)
    if num_classes is None or len(rows) == num_classes:
        return rows
    # The last of n equal parts may be too long by n - 1 classes.
    if len(rows) < num_classes or len(rows) - num_classes >= len(parts):
        raise ValueError(
            f"{path}: it holds {len(rows)} classes, and {num_classes} are needed: "
            "tools/classes.py adds, drops, merges and renumbers classes"
        )
    return rows.ordered(np.arange(num_classes))
