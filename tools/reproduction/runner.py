"""Run many trials, several at a time, and keep what each has found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any, Iterable, Iterator

from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.recognition.common.progress import progress
from dsoftmax.tools.reproduction.grid import MODEL_FILE, Trial

LOG = "log.txt"
TRIAL = "dsoftmax.tools.reproduction.trial"
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_SAVE = 60  # that a trial has when it is stopped


class TrialError(ValueError):
    """A trial has failed."""


class Runner:
    """Runs trials as processes of one thread each, which use several cores best.

    A trial that was run before is not run again; one that was interrupted goes on where it was.

    Parameters
    ----------
    cache : str
        Holds ``datasets``, and a folder in ``trials`` for each trial.
    workers : int
        Trials at a time.
    time_budget : float
        Seconds after which no more trials begin, and those that run are stopped.
    """

    def __init__(self, cache: str, workers: int, time_budget: float = float("inf")):
        self._cache = os.path.abspath(cache)
        self._workers = workers
        self._end = time.monotonic() + time_budget

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._end

    def result_of(self, trial: Trial) -> dict[str, Any] | None:
        """Return what a trial has found; None if it has not ended yet."""
        try:
            with open(self._path(trial, "result.json"), encoding="utf-8") as file:
                return json.load(file)
        except FileNotFoundError:
            return None

    def model_of(self, trial: Trial) -> str:
        """Return the parameters that a trial leaves, class weights among them."""
        return self._path(trial, MODEL_FILE)

    def _path(self, trial: Trial, name: str) -> str:
        return os.path.join(self._cache, "trials", trial.name, name)

    def run(self, trials: Iterable[Trial], desc: str = "trials") -> None:
        """Run the trials that have no result yet, in order, until the time is up.

        Those that others begin with come first.

        Raises
        ------
        TrialError
            A trial failed; the others were run.
        """
        trials = list(dict.fromkeys(trials))
        foundations = dict.fromkeys(trial.begin for trial in trials if trial.begin)
        if foundations:
            self.run(foundations, f"{desc}: foundations")
        missing = [trial for trial in trials if self.result_of(trial) is None]
        running: dict[subprocess.Popen, Trial] = {}
        failures: list[str] = []
        with _stopped_like_ctrl_c(), progress(total=len(trials), desc=desc, unit="trials") as bar:
            bar.update(len(trials) - len(missing))
            try:
                while not self.is_over and (missing or running):
                    while missing and len(running) < self._workers:
                        trial = missing.pop(0)
                        running[self._start(trial)] = trial
                    time.sleep(SECONDS_BETWEEN_LOOKS)
                    for process in [one for one in running if one.poll() is not None]:
                        trial = running.pop(process)
                        if process.returncode:
                            log = self._path(trial, LOG)
                            failures.append(f"a trial of {trial.loss} failed: see {log}")
                        bar.update(1)
            finally:  # the time is up, or the user has had enough
                _stop(list(running))
        if failures:
            raise TrialError("; ".join(failures))

    def _start(self, trial: Trial) -> subprocess.Popen:
        os.makedirs(self._path(trial, ""), exist_ok=True)
        with AtomicFile(self._path(trial, "trial.json"), "w") as file:
            json.dump(asdict(trial), file, indent=2)
        with open(self._path(trial, LOG), "w", encoding="utf-8") as log:
            return subprocess.Popen(
                [sys.executable, "-m", TRIAL, self._cache, trial.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for this process, which stops the trials
            )


@contextlib.contextmanager
def _stopped_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, so that nothing that was started stays behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(processes: list[subprocess.Popen]) -> None:
    """Let trials save their states and stop, so that they can go on later."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(SECONDS_TO_SAVE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
