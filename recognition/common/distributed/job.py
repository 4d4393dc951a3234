"""The processes of a training job: how this one joins them, and how it leaves."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from dsoftmax.recognition.common.distributed.group import Group

# What the launchers of Horovod (Gloo, Open MPI) tell their processes.
HOROVOD_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")

_joined: Group | None = None


def join(kvstore: str) -> Group:
    """Join the processes that were started together; one alone is a group of itself.

    Parameters
    ----------
    kvstore : str
        As of ``--kvstore``: ``dist_sync`` is MXNet's parameter server.
    """
    # Groups need MXNet, which a command that only prints its --help should not load.
    from dsoftmax.recognition.common.distributed.group import ALONE
    from dsoftmax.recognition.common.distributed.horovod import HorovodGroup
    from dsoftmax.recognition.common.distributed.parameter_server.worker import ServerGroup

    global _joined
    has_servers = "DMLC_PS_ROOT_URI" in os.environ
    if kvstore == "dist_sync":
        if not has_servers:
            raise ValueError(
                "--kvstore dist_sync needs a scheduler and servers: start the job by "
                "tools/launch.py"
            )
        group = ServerGroup()
    elif has_servers:
        raise ValueError(
            "this process was started as one of a job with parameter servers, but would train "
            "alone: add --kvstore dist_sync"
        )
    elif any(int(os.environ.get(name, 1)) > 1 for name in HOROVOD_VARIABLES):
        group = HorovodGroup()
    else:
        group = ALONE
    if group is not ALONE:
        sys.excepthook = _die_at_once
    _joined = group
    return group


def run(main: Callable[[], int]) -> None:
    """Run a command as this process, which ends with it: also by an error nobody expected."""
    sys.excepthook = _die_at_once
    leave(main())


def _die_at_once(kind, error, trace) -> None:
    traceback.print_exception(kind, error, trace)
    leave(1)


def leave(code: int) -> None:
    """End this process at once, with an exit code; all files must be written by now.

    An orderly end may never come: MXNet waits for the threads of operators in Python, which may
    wait for the interpreter, and for processes of the group, which wait for this one. Whoever
    started the group sees the code and stops the others; it is not 0 while they count on this one.
    """
    is_awaited = _joined is not None and _joined.is_open
    if code == 0 and is_awaited:
        print("this process ends while others of its job count on it", file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream
            stream.flush()
    if not is_awaited and (sys.gettrace() or sys.getprofile()):
        sys.exit(code)  # a debugger or profiler has something left to do
    os._exit(code)
