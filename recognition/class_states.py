"""The classes of a saved state: read as rows of its files, and written as a state of another run.

Nothing but rows of classes is changed. The network, its momenta, the step and what optimizer and
criterion count stay, so that ``train.py --resume`` goes on from the result. A forest of sampled
neighbours belongs to the old classes: it is left out, and the first step grows another one.
"""

from __future__ import annotations

import os
import shutil
from typing import Any, NamedTuple

from dsoftmax.losses.stores.base import WEIGHT
from dsoftmax.losses.trainer import SavedStates, read_states
from dsoftmax.recognition.class_edits import ClassArrays
from dsoftmax.recognition.common.arrays import Blocks, map_npy, size_of, write_arrays, write_npy
from dsoftmax.recognition.common.files import atomic_folder, explain_full_disk
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.common.rows import ROWS_AT_ONCE, Rows, finite_blocks
from dsoftmax.recognition.states import (
    StateWriter,
    find_sound_state,
    path_of,
    read_facts,
    sync_folder,
)

COPIED = ("backbone.params", "momenta.params")
# What a state says about the models beside it, of which another run's folder has none.
ABOUT_MODELS = ("best", "highest_last", "highest_sum", "verifications", "awaits_verification")
ABOUT_FILES = ("format", "files", "checksums")


class ClassState(NamedTuple):
    """The classes of a saved state.

    Attributes
    ----------
    path : str
    facts : dict
        Of ``state.json``.
    saved : SavedStates
        Of ``head.states``.
    classes : ClassArrays
    """

    path: str
    facts: dict[str, Any]
    saved: SavedStates
    classes: ClassArrays

    @property
    def shape(self) -> tuple[int, int]:
        """K and D."""
        return self.classes[WEIGHT].shape

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run."""
        return self.facts["settings"]


def read_class_state(folder: str) -> ClassState:
    """Open the classes of a state, or of the newest one of a run; its files are checked first."""
    path = find_sound_state(folder)
    saved = read_states(os.path.join(path, "head.states"))
    weights = map_npy(os.path.join(path, "classes.npy"))
    classes = {WEIGHT: Rows([weights])}
    classes.update((name, Rows([array])) for name, array in saved.arrays.items())
    if len({rows.shape for rows in classes.values()}) > 1:
        raise ValueError(f"{path}: its class weights and their momenta are of different shapes")
    facts = read_facts(path)
    if facts.get("subcentres", 1) > 1:
        raise ValueError(
            f"{path}: its classes have {facts['subcentres']} centres each, and rows of one centre "
            "can't be told from those of a class: tools/drop_centres.py leaves one of them"
        )
    return ClassState(path, facts, saved, classes)


def write_class_state(
    state: ClassState, classes: ClassArrays, output: str, is_other_data: bool
) -> str:
    """Write a state with other classes; return its path.

    Parameters
    ----------
    state : ClassState
        Everything else is this one's.
    classes : ClassArrays
    output : str
        The folder of the run that is to go on from it.
    is_other_data : bool
        Whether the run goes on with another dataset than before. It then begins with a new epoch:
        the images that were seen in the old one can't be told from the others.
    """
    folder = os.path.join(output, "states")
    facts = {
        name: value
        for name, value in state.facts.items()
        if name not in (*ABOUT_MODELS, *ABOUT_FILES)
    }
    facts["num_classes"], facts["embedding_size"] = classes[WEIGHT].shape
    if is_other_data and facts["images_seen"]:
        facts["epoch"], facts["images_seen"] = facts["epoch"] + 1, 0
    path = path_of(folder, facts["step"])
    arrays = {
        name: Blocks(rows.shape, finite_blocks(rows.blocks(), "the momentum of class"))
        for name, rows in classes.items()
        if name != WEIGHT
    }
    content = SavedStates(state.saved.facts, arrays, {}).content()
    weights = classes[WEIGHT]
    needed = size_of(content) + 4 * weights.shape[0] * weights.shape[1]
    needed += sum(os.path.getsize(os.path.join(state.path, name)) for name in COPIED)
    with explain_full_disk(path, needed), atomic_folder(path) as part:
        writer = StateWriter(part)
        for name in COPIED:
            with open(os.path.join(state.path, name), "rb") as old, writer.file(name) as new:
                shutil.copyfileobj(old, new)
        with writer.file("classes.npy") as file:
            count = -(-len(weights) // ROWS_AT_ONCE)
            blocks = progress(weights.blocks(), count, "writing class weights", "blocks")
            write_npy(file, Blocks(weights.shape, finite_blocks(blocks, "class weight")))
        with writer.file("head.states") as file:
            write_arrays(file, content)
        writer.describe(facts)
    sync_folder(folder)
    return path


def describe_head(state: ClassState) -> dict[str, Any]:
    """Return what is known of the head besides its arrays, as values for JSON."""
    settings = state.settings
    return {
        "step": state.facts["step"],
        "loss": settings["loss_options"],
        "kept_as": settings.get("class_dtype", "float32"),
        "optimizer": state.saved.facts["optimizer"],
        "criterion": state.saved.facts["criterion"],
        "has_forest": bool(state.saved.sampler),
    }
