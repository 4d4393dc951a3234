"""Few steps are measured, the others wait no more than before, and the parts add up."""

import csv

import pytest

from dsoftmax.recognition import loop, step_times, train
from dsoftmax.recognition.settings import parse
from dsoftmax.recognition.step_times import PARTS, StepTimes
from tests.recognition.runs import folder_of
from tests.waits import counted_waits


def waits_by_step(made, is_on):
    run = loop.Run(parse(made))
    run._times = StepTimes(run.settings.verbose, run.plan.total_steps, is_on)
    found = []
    for batch in run.plan.pipeline.epoch(0):
        with counted_waits() as waits:
            run.train_step(batch)
        run.step += 1
        found.append(sum(waits.values()))
    run.release()
    return found


def test_other_steps_wait_as_often_as_before(flags):
    made = flags(verbose=100, max_steps=5, target="none")  # 5 steps, the last three measured
    before, now = waits_by_step(made, False), waits_by_step(made, True)
    assert now[:2] == before[:2]
    assert min(now[2:]) > max(before)


@pytest.mark.parametrize(
    ("every", "total", "measured"),
    [
        (100, 10**9, {97, 98, 99, 197, 198, 199}),
        (60, 65, {57, 58, 59, 62, 63, 64}),
        (20, 25, {22, 23, 24}),
        (1, 10**9, set()),
        (1, 2, {1}),
    ],
)
def test_which_steps_are_measured(every, total, measured):
    times = StepTimes(every, total)
    found = set()
    for step in range(min(200, total)):
        times.begin(step)
        if times.take():
            found.add(step)
    assert found == measured


def test_the_parts_add_up(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: clock[0])

    def batches():
        for number in range(3):
            clock[0] += 5  # decoding
            yield number

    times = StepTimes(100, 3)
    for step in times.watch(batches()):
        times.begin(step)
        for part, seconds in (("head", 1), ("network", 3), ("head", 2), ("update", 4)):
            clock[0] += seconds
            times.lap(part)
    assert times.take() == {"data": 5, "network": 3, "head": 3, "update": 4}
    assert times.take() == {}


def test_a_row_of_the_end(flags):
    made = flags()  # 12 steps, verified every 4
    assert train.main(made) == 0
    with open(folder_of(made) / "times.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["12"]
    assert all(float(row["network"]) > 0 for row in rows)
    assert set(rows[0]) == {"step", *PARTS}
