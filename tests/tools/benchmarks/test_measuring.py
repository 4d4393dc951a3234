import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from dsoftmax.recognition.common.machine import describe_machine
from dsoftmax.recognition.common.memory import (
    available_bytes,
    forget_peak,
    peak_bytes,
    resident_bytes,
)
from dsoftmax.tools.benchmarks.measuring import Isolated


class Counter:
    def __init__(self, start):
        if start < 0:
            raise ValueError("no negative start")
        self.value = start

    def count(self):
        self.value += 1
        return self.value, os.getpid()

    def fail(self):
        raise OSError("the disk is full")

    def die(self):
        os._exit(3)


def test_an_isolated_object():
    isolated = Isolated(Counter, 5)
    try:
        assert isolated.call("count")[0] == 6
        value, process = isolated.call("count")
        assert value == 7
        assert process != os.getpid()
    finally:
        isolated.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_errors_come_home():
    with pytest.raises(ValueError, match="no negative start"):
        Isolated(Counter, -1)
    isolated = Isolated(Counter, 5)
    with pytest.raises(OSError, match="the disk is full"):
        isolated.call("fail")
    isolated.stop()
    isolated = Isolated(Counter, 5)
    with pytest.raises(ValueError, match="exit code 3"):
        isolated.call("die")
    isolated.stop()


def hold_and_let_go():
    """Return the peak before, at its highest and after it is forgotten, and what is held then."""
    forget_peak()
    before = peak_bytes()
    np.ones(1 << 25)
    highest = peak_bytes()
    forget_peak()
    return before, highest, peak_bytes(), resident_bytes()


def test_memory():
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # nobody else lets go of anything
        before, highest, forgotten, held = pool.submit(hold_and_let_go).result()
    assert (1 << 28) - (1 << 24) < highest - before < (1 << 28) + (1 << 26)
    assert abs(forgotten - held) < 1 << 24
    assert held < highest
    assert available_bytes() > 1 << 20


def test_machine():
    machine = describe_machine()
    assert machine["cores"] >= 1
    assert machine["memory_gb"] >= 1
    assert machine["processor"]
