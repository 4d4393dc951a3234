"""Load a configuration such as insightface's users keep, and say which of its keys do nothing."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import sys
from typing import Any, Iterable, Mapping

from easydict import EasyDict

from dsoftmax.losses import presets
from dsoftmax.recognition import config as shipped
from dsoftmax.recognition import partial_fc

PARTS = ("config", "default", "network", "dataset", "loss", "generate_config")
# insightface's keys that nothing here reads: their defaults there, and what holds here instead.
IGNORED = {
    "workspace": (256, "Gluon's convolutions have their own"),
    "ce_loss": (True, "the loss is always logged"),
    "fc7_no_bias": (False, "classes never have a bias"),
    "count_flops": (True, "the network's FLOPs are always printed"),
    "memonger": (False, "--accumulate saves memory"),
    "is_shuffled_rec": (False, "the style of a .rec file is detected, and every epoch shuffled"),
    "end_epoch": (10000, "insightface does not read it, either; --end-epoch ends a run"),
}


def load_config(path: str | None, chosen: Mapping[str, str | None]) -> Any:
    """Load the configuration of a file, or ours, without the changes of an earlier run.

    Parameters
    ----------
    path : str or None
    chosen : mapping
        ``network``, ``dataset`` and ``loss`` as the flags have them; None for a default.

    Returns
    -------
    module
        It has the names of `PARTS`.
    """
    if path and not os.path.isfile(path):
        raise FileNotFoundError(f"--config {path}: there is no such file")
    # Merging a run's choices into it changes it, also where a user's configuration imports it.
    importlib.reload(shipped)
    module = _execute(path) if path else shipped
    for name in PARTS[:-1]:
        if not isinstance(getattr(module, name, {}), dict):
            raise ValueError(f"--config {path}: {name} must be a dictionary")
    if partial_fc.is_partial_fc(module):
        raise ValueError(partial_fc.explain(module, path, chosen))
    missing = [name for name in PARTS if not hasattr(module, name)]
    if missing:
        raise ValueError(f"--config {path}: it has no {', '.join(missing)}")
    for name in ("config", "default", "network", "loss"):  # what the user's lacks is ours
        for key, value in getattr(shipped, name).items():
            getattr(module, name).setdefault(key, value)
    for name in presets.names():  # those that the user's has just registered
        module.loss.setdefault(name, EasyDict(loss_name=name))
    return module


def _execute(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("dsoftmax_run_config", path)
    if spec is None:
        raise ValueError(f"--config {path}: it is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    folder = os.path.dirname(os.path.abspath(path))
    known = set(sys.modules)
    sys.path.insert(0, folder)  # it may import files beside it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # it is a program, which can raise anything
        raise ValueError(f"--config {path}: {type(error).__name__}: {error}") from None
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - known:  # another configuration may have others beside it
            if os.path.dirname(getattr(sys.modules[name], "__file__", None) or "") == folder:
                del sys.modules[name]
    return module


def merge(module: Any, chosen: argparse.Namespace) -> None:
    """Merge the chosen network, dataset and loss into a configuration, as it does that itself."""
    try:
        module.generate_config(chosen.network, chosen.dataset, chosen.loss)
    except Exception as error:  # a user's function can raise anything
        raise ValueError(
            f"--config {chosen.config}: generate_config: {type(error).__name__}: {error}"
        ) from None


def notes_on_keys(tables: Mapping[str, Mapping[str, Any]], read: Iterable[str]) -> list[str]:
    """Return a line per key of a configuration that does nothing, unless it asks for nothing.

    Parameters
    ----------
    tables : dict of str to mapping
        `config` and `default` by their names.
    read : iterable of str
        The keys that decide something.
    """
    known = {*read, *IGNORED}
    notes = []
    for table, entries in tables.items():
        for key, value in entries.items():
            if key in IGNORED:
                usual, instead = IGNORED[key]
                if value != usual:
                    notes.append(f"note: {table}.{key} = {value!r} does nothing here: {instead}")
            elif key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f", did you mean {near[0]}?" if near else ""
                notes.append(f"warning: {table}.{key} = {value!r} does nothing{hint}")
    return notes
