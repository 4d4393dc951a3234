"""The measured speed of a device."""

import mxnet as mx
import pytest

from dsoftmax.recognition.common import speed
from dsoftmax.recognition.common.speed import measure_speed


def test_rates_are_what_was_done_per_second(monkeypatch):
    """Each measurement is made to take a quarter of a second."""
    monkeypatch.setattr(speed, "COPIED_FLOATS", 1000)
    monkeypatch.setattr(speed, "MULTIPLIED_CLASSES", 50)
    clock = iter(range(10**6))
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(clock) / 4)
    measured = measure_speed(mx.cpu(), batch_size=3, width=8)
    assert measured.products == pytest.approx(4 * 3 * 2 * 3 * 8 * 50)
    assert measured.copies == pytest.approx(4 * 2 * 4 * 1000)
