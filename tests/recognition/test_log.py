"""What a run leaves in its folder for people: tables and TensorBoard's events."""

import csv
import math
import struct
import sys
import weakref

import pytest

from dsoftmax.eval import plots
from dsoftmax.recognition import train
from dsoftmax.recognition.log import METRICS, RunLog, draw_curves
from tests.recognition.runs import (
    folder_of,
    read_table,
)


def test_a_table_without_a_column_of_today(flags):
    made = flags(max_steps=4)
    assert train.main(made) == 0
    path = folder_of(made) / "metrics.csv"
    with open(path) as file:
        rows = [row[:3] + row[4:] for row in csv.reader(file)]  # no accuracy
    path.write_text("".join(",".join(row) + "\n" for row in rows))
    assert train.main([*flags(max_steps=6), "--resume"]) == 0
    found = [row["accuracy"] for row in read_table(path)]
    assert found[:2] == ["nan", "nan"]
    assert 0 <= float(found[2]) <= 1


class TestCurves:
    """A panel of ``curves.png`` shows something, and says what."""

    def rows(self, count, **columns):
        rows = [dict.fromkeys(METRICS, 0.5) for _ in range(count)]
        for number, row in enumerate(rows):
            row.update({"step": 10.0 * number, "loss": 9.0 - number, "intra": 5.0 - number})
            row.update(columns)
        return rows

    def scores(self, count):
        return [{"step": 10.0 * n, "target": "lfw", "accuracy": 0.9} for n in range(count)]

    def lines(self, figure):
        return {
            axes.get_title(): [line.get_label() for line in axes.get_lines()]
            for axes in figure.axes
        }

    def test_all_panels(self):
        figure = draw_curves(self.rows(3), self.scores(2))
        assert self.lines(figure) == {
            "loss": ["loss", "intra", "inter above floor", "teacher"],
            "cosines of images and class weights": ["positive", "negative", "max negative"],
            "verification": ["lfw"],
            "learning rate": ["learning rate"],
        }
        assert all(axes.get_xlabel() == "step" and axes.get_ylabel() for axes in figure.axes)
        (loss, *_) = figure.axes[0].get_lines()
        assert loss.get_xydata().tolist() == [[0, 9], [10, 8], [20, 7]]

    def test_a_loss_without_parts(self):
        rows = self.rows(3, intra=math.nan, inter_above_floor=math.nan, teacher=math.nan)
        assert self.lines(draw_curves(rows, self.scores(2)))["loss"] == ["loss"]

    def test_a_part_that_is_not_known(self):
        rows = self.rows(3, inter_above_floor=math.nan, teacher=math.nan)
        assert self.lines(draw_curves(rows, []))["loss"] == ["loss", "intra"]

    def test_a_point_is_no_curve(self):
        figure = draw_curves(self.rows(3), self.scores(1))
        assert len(figure.axes) == 3
        assert "verification" not in self.lines(figure)
        assert list(self.lines(draw_curves(self.rows(1), self.scores(2)))) == ["verification"]
        assert draw_curves(self.rows(1), self.scores(1)) is None
        assert draw_curves([], []) is None


class TestTensorBoard:
    def test_scalars_are_those_of_the_tables(self, flags):
        pytest.importorskip("mxboard")
        made = flags(tensorboard=True)
        assert train.main(made) == 0
        (path,) = (folder_of(made) / "tensorboard").iterdir()
        found = {(tag, step): value for step, tag, value in read_events(path.read_bytes())}
        expected = {}
        for row in read_table(folder_of(made) / "metrics.csv"):
            for name in set(row) - {"step", "epoch"}:
                expected[name, int(row["step"])] = float(row[name])
        for row in read_table(folder_of(made) / "verification.csv"):
            expected["accuracy/val", int(row["step"])] = float(row["accuracy"])
        assert len(expected) == 6 * 9 + 3
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-6)
        assert {tag for tag, _ in set(found) - set(expected)} == {"samples_per_second"}

    def test_without_its_extra(self, flags, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "mxboard", None)
        made = flags(tensorboard=True)
        assert train.main(made) == 2
        err = capsys.readouterr().err
        assert "--tensorboard needs its extra: pip install 'dsoftmax[tensorboard]'" in err
        assert err.count("\n") == 1
        assert not folder_of(made).exists()


def read_events(content):
    """Yield (step, tag, value) of an event file: length, its checksum, event, its checksum."""
    from mxboard.proto.event_pb2 import Event

    while content:
        (length,) = struct.unpack_from("<Q", content)
        event = Event.FromString(content[12 : 12 + length])
        for value in event.summary.value:
            yield event.step, value.tag, value.simple_value
        content = content[16 + length :]


def test_a_drawn_figure_is_freed(tmp_path, monkeypatch):
    figures, save = [], plots.save

    def watch(figure, path):
        figures.append(weakref.ref(figure))
        save(figure, path)

    monkeypatch.setattr(plots, "save", watch)
    log = RunLog(str(tmp_path))
    for step in range(3):
        log.metrics({**dict.fromkeys(METRICS, 1.0), "step": step})
    log.draw()
    log.close()
    assert (tmp_path / "curves.png").exists()
    assert [figure() for figure in figures] == [None]
