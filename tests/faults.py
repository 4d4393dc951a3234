"""A training of which one process fails when it is told to; the command of a job in tests.

    python tests/faults.py --network tiny ...

takes the flags of ``train.py``. The variable DSOFTMAX_TEST_FAULT says ``process step kind``, as in
``worker1 3 stop``: worker 1 strikes before step 3 is trained (from 0), or a process without steps
(``server``, ``scheduler``) when worker 0 is there. It strikes once, not in a job that was resumed;
with the word ``always`` after it, in all of them.

Kinds are ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``slow`` (all steps from this one on),
``exception`` and ``refuse`` (from its beginning on: nobody listens where it looks for the
scheduler).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from typing import NamedTuple

VARIABLE = "DSOFTMAX_TEST_FAULT"
STEP_FILE = "DSOFTMAX_TEST_STEP_FILE"  # where worker 0 notes its step for those that have none
KINDS = ("kill", "stop", "slow", "exception", "refuse")
SLOW_STEP = 0.5


class Fault(NamedTuple):
    """What this process is to suffer, before it trains a step."""

    step: int
    kind: str

    @classmethod
    def of_this_process(cls) -> Fault | None:
        """Read the environment; return None if this process is to be spared."""
        process, step, kind, *always = os.environ.get(VARIABLE, "nobody 0 kill").split()
        if kind not in KINDS:
            raise ValueError(f"{VARIABLE}: {kind!r} is none of {', '.join(KINDS)}")
        this = os.environ["DMLC_ROLE"] + os.environ.get("DSOFTMAX_RANK", "")
        is_spared = process != this or ("--resume" in sys.argv and not always)
        return None if is_spared else cls(int(step), kind)

    def strike(self, step: int) -> None:
        """Fail, if it is time."""
        if self.kind == "slow" and step >= self.step:
            time.sleep(SLOW_STEP)
        if step != self.step:
            return
        if self.kind == "exception":
            raise RuntimeError("a cosmic ray")
        if self.kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)

    def strike_with_worker_0(self) -> None:
        """Fail when worker 0 is at the step."""
        while not _step_of_worker_0() >= self.step:
            time.sleep(0.05)
        self.strike(self.step)


def _step_of_worker_0() -> int:
    try:
        with open(os.environ[STEP_FILE]) as file:
            return int(file.read() or -1)
    except FileNotFoundError:
        return -1


def refuse_connections() -> socket.socket:
    """Have this process look for the scheduler at a port where nobody listens; keep the result."""
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))
    os.environ["DMLC_PS_ROOT_PORT"] = str(closed.getsockname()[1])
    return closed


def run_server(fault: Fault | None) -> None:
    """Be a server or the scheduler."""
    from dsoftmax.recognition.common.distributed.parameter_server import server

    if fault:
        threading.Thread(target=fault.strike_with_worker_0, daemon=True).start()
    server.serve()


def run_worker(fault: Fault | None) -> None:
    """Train."""
    from dsoftmax.recognition import loop, train
    from dsoftmax.recognition.common.distributed import job

    train_step = loop.Run.train_step

    def step_with_faults(run, batch):
        if run.group.is_first and STEP_FILE in os.environ:
            with open(os.environ[STEP_FILE], "w") as file:
                file.write(str(run.step))
        if fault:
            fault.strike(run.step)
        return train_step(run, batch)

    loop.Run.train_step = step_with_faults
    job.run(train.main)


if __name__ == "__main__":
    mine = Fault.of_this_process()
    closed_port = refuse_connections() if mine and mine.kind == "refuse" else None
    (run_worker if os.environ["DMLC_ROLE"] == "worker" else run_server)(mine)
