"""The page of a reproduction: tables, verdicts and figures, made of the trials that have ended."""

from __future__ import annotations

import os
from typing import Any, Sequence

import numpy as np

from dsoftmax.eval import plots
from dsoftmax.recognition.common.arrays import load_arrays
from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.tools.reproduction import curves, speed, sphere
from dsoftmax.tools.reproduction import outcomes as files
from dsoftmax.tools.reproduction.grid import D_VALUES, TARGETS, Setting
from dsoftmax.tools.reproduction.outcomes import Outcome, of_cell, paired_values
from dsoftmax.tools.reproduction.runner import Runner
from dsoftmax.tools.reproduction.study import Study
from dsoftmax.tools.reproduction.tables import accuracy_table, verdict_table

PAGE, TRIALS = "results.md", "trials.csv"
TITLES = {
    "table1": "Table 1: losses and values of d",
    "table2": "Table 2: sampled losses",
    "table3": "Table 3: accuracy",
}


def write(output: str, targets: Sequence[str], studies: Sequence[Study], runner: Runner) -> None:
    """Write all that the trials have shown so far.

    Parameters
    ----------
    output : str
        Folder for `PAGE`, `TRIALS` and one picture per figure.
    targets : sequence of str
        The tables and figures, and ``claims`` for the verdicts.
    studies : sequence of Study
        The main one first, whose figures are drawn.
    runner : Runner
    """
    trials = os.path.join(output, TRIALS)
    found = [outcome for study in studies for outcome in study.outcomes()]
    names = {outcome.trial for outcome in found}
    others = [outcome for outcome in files.read(trials) if outcome.trial not in names]
    files.write(trials, found + others)
    # The page follows from the file to the digit.
    found = [outcome for outcome in files.read(trials) if outcome.trial in names]
    measured = speed.read(os.path.join(output, speed.FILE))
    with AtomicFile(os.path.join(output, PAGE), "w") as file:
        file.write(page(found, [study.setting for study in studies], targets, measured))
    for target in targets:
        if target.startswith("figure"):
            figure = _draw(target, found, studies[0], runner)
            if figure is not None:
                plots.save(figure, os.path.join(output, f"{target}.png"))


def page(
    found: Sequence[Outcome],
    settings: Sequence[Setting],
    targets: Sequence[str],
    measured: speed.Speed | None = None,
) -> str:
    """Lay out the tables and the verdicts of all settings, as Markdown."""
    sections = []
    for setting in settings:
        seconds = [one.others["seconds"] for one in found if one.setting == setting.name]
        if not seconds:
            continue
        sections.append(f"## {setting.title}")
        sections.append(
            f"{len(seconds)} trials of {_steps(setting)}, {sum(seconds) / 3600:.1f} hours together."
        )
        for target in targets:
            table = accuracy_table(found, setting, target) if target in TITLES else ""
            if table:
                sections += [f"### {TITLES[target]}", table]
        if "claims" in targets:
            sections += ["### Verdicts", verdict_table(found, setting)]
    if measured and "table3" in targets:
        sections += ["## Table 3: time", speed.speed_table(measured)]
    return "\n\n".join(sections) + "\n"


def _steps(setting: Setting) -> str:
    steps = f"{setting.flags['max-steps']:,} steps"
    if setting.foundation:
        _, flags = setting.foundation
        return f"{steps} after {flags['max-steps']:,} steps of Rand-Softmax"
    return f"{steps} from random weights"


def _draw(target: str, found: Sequence[Outcome], study: Study, runner: Runner) -> Any:
    if target == "figure4":
        return draw_figure4(study, runner)
    if target == "figure5":
        return draw_figure5(found, study.setting)
    if target == "figure1":
        return sphere.draw_figure1()
    return curves.draw_figure2() if target == "figure2" else curves.draw_figure3()


def draw_figure4(study: Study, runner: Runner) -> Any | None:
    """Draw how the cosines of class weights are distributed before and after training.

    Returns
    -------
    Figure or None
        None before the trials have ended.
    """
    cells, setting = study.cells(), study.setting
    sets: dict[str, np.ndarray] = {}
    for row in TARGETS["figure4"].rows:
        if row not in cells or runner.result_of(setting.trial(cells[row], 1)) is None:
            return None
        path = runner.model_of(setting.trial(cells[row], 1))
        cell = cells[row]
        name = cell.label + (f", d = {cell.options['d']:g}" if "d" in cell.options else "")
        sets[name] = load_arrays(path)["arg:fc7_weight"].asnumpy()
    return plots.draw_classes(sets)


def draw_figure5(found: Sequence[Outcome], setting: Setting) -> Any:
    """Draw the rank-1 rate against d, of D-Softmax and of D-Softmax-K.

    Bars are deviations over seeds once each seed's own level is taken away, as in paired tests.
    """
    figure = plots.make_figure(6.0, 4.2)
    axes = figure.subplots()
    plots.show_grid(axes)
    names = {
        (kind, d): f"{kind}-{d}"
        for kind in ("d", "k")
        for d in D_VALUES
        if of_cell(found, setting.name, f"{kind}-{d}")
    }
    rates = 100 * paired_values(found, setting.name, list(names.values()), "rank1")
    deviations = rates - rates.mean(axis=0, keepdims=True)
    for number, (kind, label) in enumerate((("d", "D-Softmax"), ("k", "D-Softmax-K"))):
        rows = [row for row, (of, _) in enumerate(names) if of == kind]
        if rows and rates.size:
            axes.errorbar(
                [d for of, d in names if of == kind],
                rates[rows].mean(axis=1),
                deviations[rows].std(axis=1),
                label=label,
                marker="o",
                capsize=3,
                **plots.line_style(number),
            )
    axes.set(xlabel="d", ylabel="rank-1 identification rate (%)")
    axes.legend()
    return figure
