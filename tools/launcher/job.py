"""All processes of a job: start them, watch them, stop all if one fails or all stand still."""

from __future__ import annotations

import math
import signal
import sys
import time
from multiprocessing.connection import wait
from typing import Sequence

from dsoftmax.recognition.common.distributed import heartbeat
from dsoftmax.recognition.common.stopping import stop_signals
from dsoftmax.tools.launcher.hosts import LOCAL, Place
from dsoftmax.tools.launcher.process import Failure, Process

MOST_LOG_INS = 8  # at once per host: by default, sshd drops some from the eleventh on
SECONDS_BETWEEN_POLLS = 0.1
SECONDS_TO_FOLLOW = 4  # for other workers to end after one has ended: all should end together
SECONDS_TO_LEAVE = 10  # for servers to end when the workers are done
SECONDS_TO_STOP = 5
SECONDS_TO_DIE = 2
SECONDS_TO_ANSWER = 2
STALLED = 124  # the exit code, as that of timeout(1)


class Signals:
    """Remembers, in a ``with`` block, the first SIGTERM, SIGINT or SIGHUP."""

    def __init__(self):
        self.first: signal.Signals | None = None

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._remember) for number in stop_signals()}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _) -> None:
        self.first = self.first or signal.Signals(number)


class Job:
    """All processes of one start.

    Parameters
    ----------
    places : sequence of Place
    words : sequence of str
        The command, the same for all.
    environment : dict of str to str
        Variables that are the same for all.
    ssh : sequence of str
        How to reach other hosts.
    signals : Signals
        Signals that the launcher received.
    grace : float
        Seconds that the workers have to save and leave after a signal.
    patience : float
        Seconds without a sign of life from any worker until the job counts as stalled; 0 for no
        limit. Workers that have not given any yet are not watched.
    """

    def __init__(
        self,
        places: Sequence[Place],
        words: Sequence[str],
        environment: dict[str, str],
        ssh: Sequence[str],
        signals: Signals,
        grace: float,
        patience: float,
    ):
        self._places, self._words, self._environment, self._ssh = places, words, environment, ssh
        self._signals, self._grace, self._patience = signals, grace, patience
        self._workers: list[Process] = []
        self._others: list[Process] = []

    @property
    def _processes(self) -> list[Process]:
        return self._others + self._workers

    def run(self) -> Failure | None:
        """Start all processes, and return when none is left.

        Returns
        -------
        Failure or None
            None if the workers are done, or a signal came.
        """
        try:
            for place in self._places:
                if not self._can_start(place.host):
                    break
                self._start(place)
            return self._watch()
        finally:
            self._stop()

    def _can_start(self, host: str) -> bool:
        """Wait while too many processes log in to a host; return False if one failed."""
        while True:
            ended = [process for process in self._processes if process.has_ended()]
            if self._signals.first or any(process.code for process in ended):
                return False
            coming = [
                process
                for process in self._processes
                if process.place.host == host and not process.has_begun and process not in ended
            ]
            if host in LOCAL or len(coming) < MOST_LOG_INS:
                return True
            self._pass_output_on()

    def _start(self, place: Place) -> None:
        is_worker = place.role == "worker"
        environment = {**self._environment, "DMLC_ROLE": place.role}
        if is_worker:
            environment.update({"DSOFTMAX_RANK": str(place.rank), heartbeat.SWITCH: "1"})
        process = Process(place, self._words, environment, self._ssh)
        (self._workers if is_worker else self._others).append(process)

    def _watch(self) -> Failure | None:
        while not self._signals.first:
            self._pass_output_on()
            ended = [process for process in self._processes if process.has_ended()]
            for process in ended:
                if process.code:
                    return process.failure()
            if all(worker in ended for worker in self._workers):
                self._wait(self._others, SECONDS_TO_LEAVE)
                return None
            for process in ended:
                if time.monotonic() - process.ended_at > SECONDS_TO_FOLLOW:
                    return process.failure()
            if self._is_stalled():
                return self._explain_stall()
        say(f"{self._signals.first.name}: the workers have {self._grace:g} s to save and leave")
        for process in self._others:
            process.wake()  # the workers can't save without them
        for worker in self._workers:
            worker.terminate()
        self._wait(self._workers, self._grace)
        return None

    def _is_stalled(self) -> bool:
        heard_at = max(worker.heard_at for worker in self._workers)
        return 0 < self._patience < time.monotonic() - heard_at < math.inf

    def _explain_stall(self) -> Failure:
        """Ask all processes for their states, and say who holds the others up."""
        running = [process for process in self._processes if not process.has_ended()]
        for process in running:
            process.ask_for_state()
        until = time.monotonic() + SECONDS_TO_ANSWER
        while any(process.state is None for process in running) and time.monotonic() < until:
            self._pass_output_on()
        wrong = {process: process.what_is_wrong() for process in running}
        guilty = [process for process in running if wrong[process]]
        how = [f"{process.name} {wrong[process]}" for process in guilty]
        how.append(f"no worker got any further in {self._patience:g} s")
        last = [f"{worker.name} {worker.activity or 'silent'}" for worker in self._workers]
        place = guilty[0].place if len(guilty) == 1 else None
        return Failure(place, f"{'; '.join(how)} (last heard of: {', '.join(last)})", STALLED)

    def _stop(self) -> None:
        """Ask all remaining processes to leave, then kill them."""
        for process in self._processes:
            process.terminate()
        self._wait(self._processes, SECONDS_TO_STOP)
        for process in self._processes:
            process.kill()
        self._wait(self._processes, SECONDS_TO_DIE)
        for process in self._processes:
            process.abandon()

    def _wait(self, processes: Sequence[Process], seconds: float) -> None:
        """Wait until some processes have ended, but no longer than `seconds`."""
        until = time.monotonic() + seconds
        while not all(process.has_ended() for process in processes):
            if time.monotonic() > until:
                return
            self._pass_output_on()

    def _pass_output_on(self) -> None:
        """Print new output of the processes; wait a moment for it."""
        writers = {pipe: process for process in self._processes for pipe in process.pipes}
        for pipe in wait(writers, SECONDS_BETWEEN_POLLS):
            writers[pipe].pass_on(pipe)


def say(line: str) -> None:
    """Print a message of the launcher."""
    print(f"launch: {line}", file=sys.stderr, flush=True)
