"""What the trials of each cell have found, and the file that keeps it."""

from __future__ import annotations

import csv
import os
from typing import Any, Iterable, NamedTuple, Sequence

import numpy as np

from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.tools.reproduction.claims import ORTHOGONALITY
from dsoftmax.tools.reproduction.grid import Cell, Setting
from dsoftmax.tools.reproduction.measures import NAMES
from dsoftmax.tools.reproduction.people import TEST, VALIDATION
from dsoftmax.tools.reproduction.runner import Runner

PARTS = (VALIDATION, TEST)
OTHERS = (
    "negatives",  # of a sample
    "positive_cosine",  # at the end of training
    "class_mean",  # of the cosines of class weights
    "class_deviation",
    "seconds",
)
FIGURES = tuple(f"{part} {name}" for part in PARTS for name in NAMES)
COLUMNS = ("trial", "setting", "cell", "seed", *FIGURES, *OTHERS)


class Outcome(NamedTuple):
    """The numbers of one trial."""

    trial: str  # its name, which follows from everything that decides what it finds
    setting: str
    cell: str
    seed: int
    validation: dict[str, float]
    test: dict[str, float]
    others: dict[str, float]  # by `OTHERS`

    def value(self, metric: str, part: str = TEST) -> float:
        """Return a figure of merit: more is better."""
        if metric == ORTHOGONALITY:
            # The root of the mean square of the cosines, which is least if classes are orthogonal.
            return -float(np.hypot(self.others["class_mean"], self.others["class_deviation"]))
        return (self.validation if part == VALIDATION else self.test)[metric]

    def as_row(self) -> list[Any]:
        """Return the values of `COLUMNS`."""
        figures = [part[name] for part in (self.validation, self.test) for name in NAMES]
        figures += [self.others[name] for name in OTHERS]
        return [*self[:4], *(f"{figure:.10g}" for figure in figures)]

    @classmethod
    def from_row(cls, row: dict[str, str]) -> Outcome:
        """Return the outcome of a row of the file."""
        parts = [{name: float(row[f"{part} {name}"]) for name in NAMES} for part in PARTS]
        others = {name: float(row[name]) for name in OTHERS}
        return cls(row["trial"], row["setting"], row["cell"], int(row["seed"]), *parts, others)


def gather(
    runner: Runner, setting: Setting, cells: Iterable[Cell], known: dict[str, Outcome]
) -> list[Outcome]:
    """Return the outcomes of all trials of some cells that have ended, or are known by name."""
    outcomes = []
    for cell in cells:
        for seed in range(1, setting.seeds + 1):
            trial = setting.trial(cell, seed)
            result = runner.result_of(trial)
            if result is not None:
                place = trial.name, setting.name, cell.name, seed
                outcomes.append(Outcome(*place, *_numbers(result)))
            elif trial.name in known:
                outcomes.append(known[trial.name])
    return outcomes


def _numbers(result: dict[str, Any]) -> tuple[dict[str, float], ...]:
    edges, counts = (np.array(result["classes"][name]) for name in ("edges", "counts"))
    centres, share = (edges[1:] + edges[:-1]) / 2, counts / counts.sum()
    mean = float(share @ centres)
    others = {
        "negatives": result["stats"]["negatives"],
        "positive_cosine": result["training"]["positive_cosine"],
        "class_mean": mean,
        "class_deviation": float(np.sqrt(share @ (centres - mean) ** 2)),
        "seconds": result["seconds"],
    }
    return result[VALIDATION], result[TEST], others


def write(path: str, outcomes: Iterable[Outcome]) -> None:
    """Write all numbers of all trials, so that everybody can check what is made of them."""
    with AtomicFile(path, "w") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows(outcome.as_row() for outcome in outcomes)


def read(path: str) -> list[Outcome]:
    """Read what `write` wrote; nothing if there is no file."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", newline="") as file:
        return [Outcome.from_row(row) for row in csv.DictReader(file)]


def of_cell(outcomes: Sequence[Outcome], setting: str, cell: str) -> dict[int, Outcome]:
    """Return the outcomes of a cell by seed."""
    return {
        outcome.seed: outcome
        for outcome in outcomes
        if outcome.setting == setting and outcome.cell == cell
    }


def paired_values(
    outcomes: Sequence[Outcome], setting: str, cells: Sequence[str], metric: str, part: str = TEST
) -> np.ndarray:
    """Return a metric of some cells on the seeds that all of them have, (cells, seeds)."""
    by_seed = [of_cell(outcomes, setting, cell) for cell in cells]
    seeds = sorted(set.intersection(*(set(found) for found in by_seed)))
    values = [[found[seed].value(metric, part) for seed in seeds] for found in by_seed]
    return np.array(values).reshape(len(cells), len(seeds))


def best_cell(
    outcomes: Sequence[Outcome], setting: str, cells: Sequence[Cell], metric: str
) -> Cell | None:
    """Return the cell with the best mean on the validation people, over the seeds all have."""
    tried = [cell for cell in cells if of_cell(outcomes, setting, cell.name)]
    if not tried:
        return None
    names = [cell.name for cell in tried]
    means = paired_values(outcomes, setting, names, metric, VALIDATION).mean(axis=1)
    return tried[int(np.argmax(means))]
