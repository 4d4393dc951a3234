"""Measure what the parts of a training step take: data, network, head and update."""

from __future__ import annotations

import time
from typing import Iterable, Iterator, TypeVar

from mxnet import nd

PARTS = ("data", "network", "head", "update")
MEASURED_STEPS = 3  # before a verification, and before the end of a run
FEWEST_BETWEEN = 50  # steps; where verifications are more frequent, only the end is measured

Item = TypeVar("Item")


class StepTimes:
    """Measures a few steps before each verification, unless these are frequent, and at the end.

    To know when a part is done, a step must wait for the device after each part, which then can't
    work ahead: a measured step takes longer than others. So few steps are measured, and no other
    step waits. What is computed is the same.

    Parameters
    ----------
    every : int
        Steps between verifications.
    total_steps : int
        The end of the run.
    is_on : bool
        Whether to measure at all.
    """

    def __init__(self, every: int, total_steps: int, is_on: bool = True):
        self._every, self._total_steps, self._is_on = every, total_steps, is_on
        self._steps_of_process = 0
        self._waited_for_data = 0.0
        self._is_measuring = False
        self._forget()

    def _forget(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._measured = 0

    def watch(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield batches, and measure how long each was waited for."""
        batches = iter(batches)
        while True:
            started = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waited_for_data = time.perf_counter() - started
            yield batch

    def begin(self, step: int) -> None:
        """Begin a step, of which `step` are done; measure it if it is one of the few."""
        left = self._total_steps - step
        if self._every >= FEWEST_BETWEEN:
            left = min(left, self._every - step % self._every)
        # The first step of a process compiles and allocates.
        is_warm = self._steps_of_process > 0
        self._is_measuring = self._is_on and is_warm and left <= MEASURED_STEPS
        self._steps_of_process += 1
        if self._is_measuring:
            nd.waitall()
            self._seconds["data"] += self._waited_for_data
            self._measured += 1
            self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """Count the time since the last call for a part."""
        if not self._is_measuring:
            return
        nd.waitall()
        now = time.perf_counter()
        self._seconds[part] += now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """Return each part's seconds per step, of the steps measured since the last call."""
        if not self._measured:
            return {}
        taken = {part: seconds / self._measured for part, seconds in self._seconds.items()}
        self._forget()
        return taken
