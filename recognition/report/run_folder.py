"""Read what the files in a run's folder say about it."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from typing import Any

import numpy as np

from dsoftmax.losses import triplet
from dsoftmax.recognition.common.arrays import map_npy
from dsoftmax.recognition.log import read_table
from dsoftmax.recognition.models import RESULTS_FILE
from dsoftmax.recognition.settings import Settings
from dsoftmax.recognition.states import is_whole, list_states, read_facts


class RunFolder:
    """The files of a run, as far as there are any.

    Parameters
    ----------
    path : str

    Attributes
    ----------
    config : dict
        ``config.json``: the settings, and what they came to.
    settings : Settings
    metrics, scores, times : list of dict
        The rows of ``metrics.csv``, ``verification.csv`` and ``times.csv``.
    results : list of dict
        The newest verification, in detail.
    results_step : int
        Its step.
    diverged : dict or None
        The diagnosis, if this is how the run ended.
    state : str or None
        The newest whole state.
    facts : dict
        What it says; empty if there is none.
    """

    def __init__(self, path: str):
        self.path = path
        config = self._read_json("config.json")
        if config is None:
            raise FileNotFoundError(
                f"{path}: there is no config.json in it: give the folder of a run, such as "
                "models/r50-dsoftmax-emore"
            )
        self.config = config
        # A run of an earlier version lacks the settings that were added since.
        self.settings = Settings(
            **{one.name: config.get(one.name) for one in fields(Settings) if one.name != "notes"}
        )
        self.metrics, self.scores, self.times = (
            read_table(os.path.join(path, f"{name}.csv"))
            for name in ("metrics", "verification", "times")
        )
        states = filter(is_whole, list_states(os.path.join(path, "states")))
        self.state = next(states, None)
        self.facts: dict[str, Any] = read_facts(self.state) if self.state else {}
        newest = self._read_json(RESULTS_FILE) or {"step": 0, "results": []}
        self.results_step, self.results = newest["step"], newest["results"]
        diverged = self._read_json("diverged.json")
        # A run may have been resumed, and got past the place.
        is_end = diverged is not None and diverged["step"] >= self.last_step
        self.diverged = diverged if is_end else None

    def _read_json(self, name: str) -> Any:
        path = os.path.join(self.path, name)
        if not os.path.exists(path):
            return None
        try:
            with open(path, encoding="utf-8") as file:
                return json.load(file)
        except ValueError as error:
            raise ValueError(f"{path}: it is no JSON ({error})") from None

    @property
    def name(self) -> str:
        """The run's name."""
        return os.path.basename(os.path.abspath(self.path))

    @property
    def last_step(self) -> int:
        """The last step that the files know of."""
        return max(int(self.metrics[-1]["step"]) if self.metrics else 0, self.facts.get("step", 0))

    @property
    def total_steps(self) -> int:
        """The step at which the run is to end; 0 if there is none, or it is not known."""
        return self.config.get("resolved_total_steps") or self.config.get("max_steps") or 0

    @property
    def num_classes(self) -> int:
        """K."""
        return self.config.get("resolved_num_classes") or self.facts.get("num_classes", 0)

    @property
    def has_classes(self) -> bool:
        """Whether images are compared with classes; triplets compare them with each other."""
        return self.settings.loss_options["preset"] not in triplet.TITLES

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps and values of a column of ``metrics.csv`` where it is finite."""
        steps = np.array([row["step"] for row in self.metrics])
        values = np.array([row.get(name, np.nan) for row in self.metrics], float)
        is_finite = np.isfinite(values)
        return steps[is_finite], values[is_finite]

    def class_weights(self) -> np.ndarray:
        """Map the class weights of the newest state, (K, D)."""
        if self.state is None:
            raise ValueError("no state was saved")
        return map_npy(os.path.join(self.state, "classes.npy"))
