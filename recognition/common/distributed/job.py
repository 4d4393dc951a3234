"""How this process joins the others of a training job, and how it leaves them."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from dsoftmax.recognition.common.distributed.group import Group

# Environment variables that Horovod's launchers (Gloo, Open MPI) set.
HOROVOD_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")

_joined: Group | None = None


def join(kvstore: str) -> Group:
    """Join the processes that were started together; a single one is a group of its own.

    Parameters
    ----------
    kvstore : str
        The value of ``--kvstore``; ``dist_sync`` is MXNet's parameter server.
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
    """Run a command and end this process with its exit code, also after an unexpected error."""
    sys.excepthook = _die_at_once
    leave(main())


def _die_at_once(kind, error, trace) -> None:
    traceback.print_exception(kind, error, trace)
    leave(1)


def leave(code: int) -> None:
    """End this process at once, with an exit code; all files must be written by now.

    An orderly shutdown may hang: MXNet waits for threads that wait for the interpreter, and for
    other processes that wait for this one. The launcher sees the exit code and stops the others; it
    is never 0 while they depend on this process.
    """
    is_awaited = _joined is not None and _joined.is_open
    if code == 0 and is_awaited:
        print("this process ends while others of its job depend on it", file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream
            stream.flush()
    if not is_awaited and (sys.gettrace() or sys.getprofile()):
        sys.exit(code)  # a debugger or profiler has something left to do
    os._exit(code)
