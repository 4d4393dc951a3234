"""What a line of the log says about the progress of a run."""

import sys
from types import SimpleNamespace

import pytest

from dsoftmax.recognition import log_lines
from dsoftmax.recognition.log_lines import Position, StepLines


class Head:
    """A head of which nothing but the statistics is asked."""

    criterion = SimpleNamespace(dissected=False)
    sampler = SimpleNamespace(is_sparse=False)
    stats = dict.fromkeys(
        ("accuracy", "intra", "inter", "positive_cosine", "negative_cosine", "max_negative_cosine"),
        0.5,
    )


@pytest.fixture
def lines(monkeypatch):
    """Return a function that trains, a second per step, and returns the lines of the log."""

    def train(total_steps, first, last, pause=0):
        clock = SimpleNamespace(now=100.0)
        monkeypatch.setattr(log_lines.time, "perf_counter", lambda: clock.now)
        said = []
        plan = SimpleNamespace(
            total_steps=total_steps,
            batch_size=8,
            rate_at=lambda step: 0.1,
            group=SimpleNamespace(is_first=True),
            settings=SimpleNamespace(frequent=2, lr_schedule="step"),
        )
        log = SimpleNamespace(step=lambda: 0, metrics=lambda row: 0, info=said.append)
        made = StepLines(plan, Head, log)
        for step in range(first, last + 1):
            clock.now += 1
            made.step(Position(step, 0, 8 * step), loss=1.0)
            with made.paused():
                clock.now += pause
        return said

    return train


def test_step_total_and_time_left(lines):
    said = lines(10_000, first=1, last=4)
    assert said[0].startswith("Epoch[0] Batch [0-2]\tSpeed: 8.00 samples/sec\tacc=")
    assert said[0].endswith("\tStep 2/10000\tETA 2:46:38")
    assert said[1].endswith("\tStep 4/10000\tETA 2:46:36")


def test_a_resumed_run_counts_its_own_steps(lines):
    assert lines(20, first=11, last=12)[0].endswith("\tStep 12/20\tETA 0:00:08")


def test_verifications_take_time_too(lines):
    # Two steps and the pause between them took 12 seconds.
    assert lines(10, first=1, last=2, pause=10)[0].endswith("\tStep 2/10\tETA 0:00:48")


def test_a_run_without_an_end(lines):
    assert lines(sys.maxsize, first=1, last=2)[0].endswith("\tStep 2")
