"""Signs of life: a worker tells the launcher that watches it how far it is."""

from __future__ import annotations

import contextlib
import os

SWITCH = "DSOFTMAX_HEARTBEAT"  # the launcher sets it for all workers
MARK = "launch: heartbeat: "  # begins a line on stdout, which the launcher keeps to itself
STDOUT = 1

_activity = "starting"


def beat(activity: str | None = None) -> None:
    """Tell the launcher, if there is one, that this process has just got further.

    Call it again and again during everything that may take minutes: the launcher stops a job that
    gives no sign of life for ``--stall-timeout`` seconds.

    Parameters
    ----------
    activity : str, optional
        What this process does from now on; by default, the same as before.
    """
    global _activity
    _activity = activity or _activity
    if SWITCH in os.environ:
        with contextlib.suppress(OSError):  # the launcher is gone, and this process will be
            os.write(STDOUT, f"{MARK}{_activity}\n".encode())  # at once, whoever else prints
