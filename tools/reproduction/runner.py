"""Run many trials, several at a time, and keep what each has found."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from typing import Any, Iterable

from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.recognition.common.progress import progress
from dsoftmax.tools.reproduction.grid import MODEL_FILE, Trial

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
        missing: queue.SimpleQueue = queue.SimpleQueue()
        for trial in trials:
            if self.result_of(trial) is None:
                missing.put(trial)
        failures: list[str] = []
        with progress(total=len(trials), desc=desc, unit="trials") as bar:
            bar.update(len(trials) - missing.qsize())

            def work() -> None:
                while not self.is_over:
                    try:
                        trial = missing.get_nowait()
                    except queue.Empty:
                        return
                    failure = self._run(trial)
                    if failure:
                        failures.append(failure)
                    bar.update(1)

            threads = [threading.Thread(target=work) for _ in range(self._workers)]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt:
                self._end = 0.0  # the trials save their state and stop
                for thread in threads:
                    thread.join()
                raise
        if failures:
            raise TrialError("; ".join(failures))

    def _run(self, trial: Trial) -> str:
        """Run one trial; return why it failed, if it did."""
        os.makedirs(self._path(trial, ""), exist_ok=True)
        with AtomicFile(self._path(trial, "trial.json"), "w") as file:
            json.dump(asdict(trial), file, indent=2)
        log = self._path(trial, "log.txt")
        with open(log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", TRIAL, self._cache, trial.name],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for this process, which stops the trials
            )
            while process.poll() is None:
                if self.is_over:
                    _stop(process)
                    return ""
                time.sleep(SECONDS_BETWEEN_LOOKS)
        return "" if process.returncode == 0 else f"a trial of {trial.loss} failed: see {log}"


def _stop(process: subprocess.Popen) -> None:
    """Let a trial save its state and stop, so that it can go on later."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(SECONDS_TO_SAVE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
