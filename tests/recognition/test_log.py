"""What a run leaves in its folder for people: tables and TensorBoard's events."""

import csv
import struct
import sys

import pytest

from dsoftmax.recognition import train
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
