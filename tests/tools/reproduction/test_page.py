"""The committed page says what the committed numbers say."""

from pathlib import Path

import pytest

import dsoftmax.tools.reproduction
from dsoftmax.tools.reproduction import outcomes, report, scales, speed
from dsoftmax.tools.reproduction.study import known_cells

FOLDER = Path(dsoftmax.tools.reproduction.__path__[0])
SETTINGS = scales.small_settings(5)
TARGETS = ("table1", "table2", "table3", "claims")


@pytest.fixture(scope="module")
def found():
    return outcomes.read(str(FOLDER / report.TRIALS))


def test_tables_and_verdicts_follow_from_the_numbers(found):
    assert (FOLDER / report.PAGE).read_text() == report.page(
        found, SETTINGS, TARGETS, speed.read(str(FOLDER / speed.FILE))
    )


def test_numbers_belong_to_trials_of_settings_that_exist(found):
    for setting in SETTINGS:
        cells = {cell.name: cell for cell in known_cells(found, setting).values()}
        for one in (one for one in found if one.setting == setting.name):
            assert one.trial == setting.trial(cells[one.cell], one.seed).name
    assert {one.setting for one in found} <= {setting.name for setting in SETTINGS}
    assert all(0 <= value <= 1 for one in found for value in one.test.values())
