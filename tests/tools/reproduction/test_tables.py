"""Tables, verdicts and the file of numbers, from outcomes that are made up."""

import re

import numpy as np
import pytest

from dsoftmax.tools.reproduction import outcomes as files
from dsoftmax.tools.reproduction.grid import Setting, fixed_cells, tuned_cells
from dsoftmax.tools.reproduction.measures import NAMES
from dsoftmax.tools.reproduction.outcomes import Outcome, best_cell, paired_values
from dsoftmax.tools.reproduction.report import draw_figure5, page
from dsoftmax.tools.reproduction.study import known_cells
from dsoftmax.tools.reproduction.tables import accuracy_table, verdict_table

SETTING = Setting("made-up", "Made-up numbers", "data", 16, 64, 5, {"max-steps": 100})


def outcome(cell, seed, validation, test, spread=0.1, negatives=312.0):
    others = {"negatives": negatives, "positive_cosine": 0.5, "seconds": 1.0}
    others.update(class_mean=0.0, class_deviation=spread)
    figures = [dict.fromkeys(NAMES, value) for value in (validation, test)]
    return Outcome(f"{cell}-{seed}", "made-up", cell, seed, *figures, others)


@pytest.fixture
def found(rng):
    """Return five seeds of all cells; on validation people d = 0.7 and m2 = 0.2 are best."""
    groups = tuned_cells(64)
    wanted = {"d": 0.7, "m2": 0.2}
    best = {
        name: next(cell for cell in group if wanted.items() & cell.options.items())
        for name, group in groups.items()
    }
    tuned = {cell.name for cell in best.values()}
    names = [cell.name for group in groups.values() for cell in group]
    names += list(fixed_cells(best, 64))
    level = {"softmax": 0.5, "rand-softmax": 0.6, "intra": 0.1, "d-1.0": 0.65}
    made = []
    for seed in range(1, 6):
        luck = 0.1 * rng.normal()  # which a paired test must not see
        for name in names:
            value = level.get(name, 0.55) + luck + 0.002 * rng.normal()
            validation = 0.9 if name in tuned else 0.2
            spread = 0.4 if name == "intra" else 0.1 + 0.001 * rng.normal()
            made.append(outcome(name, seed, validation, value, spread))
    return made


def test_the_best_is_chosen_on_validation_people_alone(found):
    cells = known_cells(found, SETTING)
    assert cells["d-best"].options == {"d": 0.7}
    assert cells["k"].options["d"] == 0.7
    assert cells["d+arcface"].options == {"d": 0.7, "m2": 0.2}
    mistaken = [one._replace(test=dict.fromkeys(NAMES, float(one.seed))) for one in found]
    assert known_cells(mistaken, SETTING) == cells


def test_the_best_of_those_that_were_tried(found):
    group = tuned_cells(64)["d-best"]
    some = [one for one in found if one.cell != "d-0.7"]
    tried = {cell.name for cell in group} - {"d-0.7"}
    assert best_cell(some, "made-up", group, "tar@1e-3").name in tried
    assert best_cell([], "made-up", group, "tar@1e-3") is None


def test_pairs_are_of_the_same_seeds(found):
    some = [one for one in found if (one.cell, one.seed) != ("softmax", 2)]
    values = paired_values(some, "made-up", ["softmax", "k-0.7"], "rank1")
    expected = [
        [one.test["rank1"] for one in found if one.cell == cell and one.seed != 2]
        for cell in ("softmax", "k-0.7")
    ]
    assert values.tolist() == expected


def test_verdicts(found):
    table = verdict_table(found, SETTING)
    verdict = dict(re.findall(r"\*\*\(([^)]*)\)\*\*.*\*\*(.*)\*\* \|", table))
    assert verdict["1"] == "holds"  # 0.55 against Softmax's 0.5, in spite of the luck
    assert verdict["5"] == "does not hold"  # against Rand-Softmax's 0.6
    assert verdict["6"] == "holds"
    assert verdict["3"] == "holds"  # as good as all classes
    assert verdict["2"] == "does not hold"  # d = 1 has 0.65, d = 0.9 has 0.55


def test_a_table_shows_means_deviations_and_the_paper(found):
    lines = accuracy_table(found, SETTING, "table1").splitlines()
    values = [one.test["rank1"] for one in found if one.cell == "softmax"]
    row = next(line for line in lines if line.startswith("| Softmax |"))
    mean, deviation = 100 * np.mean(values), 100 * np.std(values, ddof=1)
    assert row.endswith(f"| {mean:.2f} ± {deviation:.2f} |")
    assert "| 5 |" in row
    assert "*91.25*" in lines[lines.index(row) + 1]
    # With 312 orthogonal negatives Softmax ends at log(312) / 16, D-Softmax at d.
    assert f"| {np.log(312) / 16:.2f} |" in row
    assert "| D-Softmax | d = 0.7 | 312 | 0.70 |" in "\n".join(lines)


def test_numbers_survive_their_file(found, tmp_path):
    path = str(tmp_path / "trials.csv")
    files.write(path, found)
    again = files.read(path)
    assert page(again, [SETTING], ["table1", "table2", "claims"]) == page(
        found, [SETTING], ["table1", "table2", "claims"]
    )
    assert again[3].value("orthogonality") == pytest.approx(found[3].value("orthogonality"))


def test_a_page_before_anything_was_trained():
    assert page([], [SETTING], ["table1", "claims"]).strip() == ""


def test_figure5(found):
    (axes,) = draw_figure5(found, SETTING).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "D-Softmax",
        "D-Softmax-K",
    ]
