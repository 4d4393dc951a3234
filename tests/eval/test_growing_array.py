"""Rows on disk count only if the state says so; test_feature_cache kills the writer."""

import json

import numpy as np
import pytest

from dsoftmax.eval.growing_array import GrowingArray


@pytest.fixture
def open_array(tmp_path):
    return lambda count=5: GrowingArray(str(tmp_path / "a.npy"), str(tmp_path / "a.json"), count)


def test_rows_and_notes_go_on(open_array):
    rows = open_array()
    rows.open((2,))
    rows.append(np.array([[1, 2], [3, 4]]), bad=[1])
    rows.close()
    rows = open_array()
    assert (rows.done, rows.notes) == (2, {"bad": [1]})
    rows.open((2,))
    rows.append(np.arange(6).reshape(3, 2), bad=[], good=["x"])
    rows.close()
    assert open_array().notes == {"bad": [1], "good": ["x"]}
    np.testing.assert_array_equal(np.load(rows.path), [[1, 2], [3, 4], [0, 1], [2, 3], [4, 5]])


def test_rows_of_another_width_are_forgotten(open_array):
    rows = open_array()
    rows.open((2,))
    rows.append(np.ones((2, 2)), bad=[1])
    rows.close()
    rows = open_array()
    rows.open((3,))
    assert (rows.done, rows.notes) == (0, {})
    rows.close()


def test_a_state_of_an_older_version_is_ignored(open_array, tmp_path):
    np.save(tmp_path / "a.npy", np.ones((5, 2)))
    (tmp_path / "a.json").write_text(json.dumps({"done": 3, "width": 2, "unreadable": []}))
    assert open_array().done == 0


@pytest.mark.parametrize(
    "state",
    [
        '{"done": 2, "row": [2], "notes": {}',
        '{"done": 9, "row": [2], "notes": {}}',
        '{"done": 1e999, "row": [2], "notes": {}}',
        '{"done": 2, "row": 2, "notes": {}}',
        '{"done": 4, "row": [200], "notes": {}}',
        "[]",
    ],
)
def test_a_damaged_state_is_named(open_array, tmp_path, state):
    rows = open_array()
    rows.open((2,))
    rows.append(np.ones((2, 2)), bad=[])
    rows.close()
    (tmp_path / "a.json").write_text(state)
    if state == "[]":  # of an older version
        assert open_array().done == 0
        return
    with pytest.raises(ValueError, match=r"a\.json: it does not fit .*a\.npy"):
        open_array()
