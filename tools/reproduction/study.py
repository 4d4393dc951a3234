"""A study: trains the cells of tables and figures in one setting, tuned ones first."""

from __future__ import annotations

from typing import Iterable, Sequence

from dsoftmax.tools.reproduction.claims import METRIC
from dsoftmax.tools.reproduction.grid import TARGETS, Cell, Setting, Trial, fixed_cells, tuned_cells
from dsoftmax.tools.reproduction.outcomes import Outcome, best_cell, gather
from dsoftmax.tools.reproduction.runner import Runner

TUNING_SEEDS = 2  # that choose a margin; every value of d gets all seeds, because d is a claim


def known_cells(outcomes: Sequence[Outcome], setting: Setting) -> dict[str, Cell]:
    """Return all cells of a setting by name; those that wait for another one's tuning are missing.

    The name of a group of `tuned_cells` stands for its best cell.
    """
    groups = tuned_cells(setting.part)
    best = {}
    for name, group in groups.items():
        chosen = best_cell(outcomes, setting.name, group, METRIC)
        if chosen:
            best[name] = chosen
    cells = {cell.name: cell for group in groups.values() for cell in group}
    return {**cells, **fixed_cells(best, setting.part), **best}


class Study:
    """The trials of one setting.

    Parameters
    ----------
    runner : Runner
    setting : Setting
    known : sequence of Outcome
        Of trials that need not be run.
    """

    def __init__(self, runner: Runner, setting: Setting, known: Sequence[Outcome] = ()):
        self._runner, self.setting = runner, setting
        self._known = {outcome.trial: outcome for outcome in known}

    def run(self, targets: Iterable[str]) -> None:
        """Run all trials of some tables and figures, until the time is up."""
        targets = list(targets)
        tuning: list[Trial] = []
        for group in dict.fromkeys(group for target in targets for group in TARGETS[target].tuned):
            seeds = TUNING_SEEDS if "arcface" in group else self.setting.seeds
            tuning += self.setting.trials(tuned_cells(self.setting.part)[group], seeds)
        self._train(tuning, "tuning")
        cells = self.cells()
        rows = dict.fromkeys(row for target in targets for row in TARGETS[target].rows)
        chosen = [cells[row] for row in rows if row in cells]
        self._train(self.setting.trials(chosen), "all seeds")

    def _train(self, trials: Sequence[Trial], desc: str) -> None:
        unknown = [trial for trial in trials if trial.name not in self._known]
        if unknown:
            self._runner.run(unknown, f"{self.setting.name}: {desc}")

    def cells(self) -> dict[str, Cell]:
        """Return all cells by name, as `known_cells`."""
        groups = tuned_cells(self.setting.part).values()
        tuned = [cell for group in groups for cell in group if self.setting.is_wanted(cell)]
        return known_cells(self._gather(tuned), self.setting)

    def outcomes(self) -> list[Outcome]:
        """Return what all trials have found that have ended."""
        cells = {cell.name: cell for cell in self.cells().values() if self.setting.is_wanted(cell)}
        return self._gather(cells.values())

    def _gather(self, cells: Iterable[Cell]) -> list[Outcome]:
        return gather(self._runner, self.setting, cells, self._known)
