"""The paper's tables and the verdicts on its claims, as Markdown."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from dsoftmax.tools.reproduction.claims import (
    CLAIMS,
    ORTHOGONALITY,
    Comparison,
    Difference,
    judge,
    judge_all,
    paired_difference,
)
from dsoftmax.tools.reproduction.grid import TARGETS, Cell, Setting
from dsoftmax.tools.reproduction.markdown import bold, row
from dsoftmax.tools.reproduction.measures import NAMES
from dsoftmax.tools.reproduction.outcomes import Outcome, of_cell, paired_values
from dsoftmax.tools.reproduction.study import known_cells

HEADINGS = ("accuracy", "TAR 1e-1", "1e-2", "1e-3", "1e-4", "rank-1")  # of `NAMES`
# The paper's figures: LFW, IJB-C's true accept rates, MegaFace's rank-1.
PAPER = {
    "softmax": (99.30, 98.15, 95.82, 91.45, 85.43, 91.25),
    "sphereface": (99.59, 98.03, 96.10, 92.60, 86.41, 96.04),
    "arcface-best": (99.68, 98.01, 95.84, 92.64, 87.29, 96.97),
    "d-0.5": (99.38, 98.02, 95.80, 91.45, 85.47, 92.06),
    "d-0.7": (99.60, 98.08, 96.15, 92.58, 86.56, 95.90),
    "d-0.9": (99.74, 98.09, 96.21, 92.91, 88.17, 96.94),
    "d-1.0": (99.63, 98.03, 96.11, 92.60, 86.88, 96.25),
    "d+softmax": (99.47, 98.01, 95.94, 91.78, 85.86, 93.08),
    "d+arcface": (99.73, 98.02, 96.12, 92.97, 88.28, 97.02),
    "d-best": (99.74, 98.09, 96.21, 92.91, 88.17, 96.94),
    "b-more": (99.74, 98.03, 96.20, 93.02, 87.98, 96.91),
    "b": (99.60, 98.09, 95.87, 92.15, 86.74, 95.34),
    "k": (99.55, 98.09, 95.40, 92.01, 86.03, 94.72),
    "rand-softmax": (99.07, 98.05, 94.30, 87.52, 78.96, 88.27),
    "rand-arcface": (99.43, 98.11, 95.14, 91.27, 84.26, 93.62),
    "hf-softmax": (99.18, 97.92, 94.45, 89.63, 81.85, 91.18),
}


def accuracy_table(outcomes: Sequence[Outcome], setting: Setting, target: str) -> str:
    """Lay out a table of the paper: mean and deviation over seeds, the paper's row beneath.

    Without any outcome of its rows there is no table.

    Parameters
    ----------
    outcomes : sequence of Outcome
    setting : Setting
    target : {"table1", "table2", "table3"}
    """
    cells = known_cells(outcomes, setting)
    lines = [
        row(["loss", "settings", "negatives", "ends at", "seeds", *HEADINGS]),
        row(["---"] * (5 + len(HEADINGS))),
    ]
    for name in TARGETS[target].rows:
        if name not in cells:
            continue
        found = list(of_cell(outcomes, setting.name, cells[name].name).values())
        if not found:
            continue
        values = np.array([[outcome.test[metric] for metric in NAMES] for outcome in found])
        negatives = float(np.mean([outcome.others["negatives"] for outcome in found]))
        end = cells[name].termination_point(setting.scale, negatives)
        figures = [_spread(column) for column in values.T]
        lines.append(
            row(
                [
                    cells[name].label,
                    _describe(cells[name]),
                    f"{negatives:,.0f}",
                    f"{end:.2f}",
                    str(len(found)),
                    *figures,
                ]
            )
        )
        if name in PAPER:
            lines.append(
                row(["*the paper*", *[""] * 4, *(f"*{figure:.2f}*" for figure in PAPER[name])])
            )
    return "\n".join(lines) if len(lines) > 2 else ""


def verdict_table(outcomes: Sequence[Outcome], setting: Setting) -> str:
    """Lay out the verdict on each claim, with the differences that decide it."""
    cells = known_cells(outcomes, setting)
    lines = [
        row(["claim", "compared", "difference [95 % interval]", "seeds", "verdict"]),
        row(["---"] * 5),
    ]
    for claim in CLAIMS:
        rows, verdicts = [], []
        for comparison in claim.comparisons:
            difference = compare(outcomes, setting, comparison, cells)
            if difference is None:
                verdicts.append(judge_all([]))
                continue
            verdicts.append(judge(difference, comparison.margin))
            rows.append((comparison, difference, verdicts[-1]))
        if not rows:
            continue
        text = claim.text.format(main=f"1/{setting.part}", more=f"1/{setting.part // 4}")
        lines.append(row([f"**({claim.number})** {text}", "", "", "", bold(judge_all(verdicts))]))
        for comparison, difference, verdict in rows:
            lines.append(
                row(
                    [
                        "",
                        _describe_comparison(comparison, cells),
                        _describe_difference(difference, comparison.metric),
                        str(difference.pairs),
                        verdict,
                    ]
                )
            )
    return "\n".join(lines)


def compare(
    outcomes: Sequence[Outcome], setting: Setting, comparison: Comparison, cells: dict[str, Cell]
) -> Difference | None:
    """Return the paired difference of two cells; None if one has no trials."""
    if comparison.first not in cells or comparison.second not in cells:
        return None
    names = [cells[name].name for name in comparison[:2]]
    first, second = paired_values(outcomes, setting.name, names, comparison.metric)
    return paired_difference(first, second) if len(first) else None


def _describe_comparison(comparison: Comparison, cells: dict[str, Cell]) -> str:
    first, second = (f"{cells[name].label} {_describe(cells[name])}" for name in comparison[:2])
    if not comparison.margin:
        return f"{first.strip()} is better than {second.strip()}"
    margin = comparison.margin
    size = f"{margin:g}" if comparison.metric == ORTHOGONALITY else f"{100 * margin:g} points"
    return f"{first.strip()} is at most {size} worse than {second.strip()}"


def _describe_difference(difference: Difference, metric: str) -> str:
    if metric == ORTHOGONALITY:
        mean, low, high = (f"{-value:+.3f}" for value in difference[:3])
        return f"{mean} [{high}, {low}] in the root mean square cosine"
    mean, low, high = (f"{100 * value:+.2f}" for value in difference[:3])
    return f"{mean} [{low}, {high}] points of {metric}"


def _describe(cell: Cell) -> str:
    """Return the options of a cell, as ``d = 0.9, 1/64``."""
    parts = [f"{name} = {cell.options[name]:g}" for name in ("d", "m2") if name in cell.options]
    if "sample_rate" in cell.options:
        parts.append(f"1/{round(1 / cell.options['sample_rate'])}")
    return ", ".join(parts)


def _spread(values: np.ndarray) -> str:
    deviation = f" ± {100 * values.std(ddof=1):.2f}" if len(values) > 1 else ""
    return f"{100 * values.mean():.2f}{deviation}"
