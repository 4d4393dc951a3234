"""The processes of a training job: how this one joins them, and how it leaves."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Callable

from mxnet import nd

from dsoftmax.losses.groups import ALONE, Group
from dsoftmax.losses.servers import ServerGroup

# What the launchers of Horovod (Gloo, Open MPI) tell their processes.
HOROVOD_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")

_joined: Group = ALONE


class HorovodGroup(Group):
    """The processes that ``horovodrun`` started."""

    def __init__(self):
        try:
            import horovod.mxnet as hvd
        except ImportError as error:
            raise ValueError(
                "this process was started by horovodrun, but Horovod can't be imported here "
                f"({error}): see 'Many machines' in the README for how to install it"
            ) from None
        hvd.init()
        self._hvd = hvd
        self.is_open = True
        self.rank, self.size = hvd.rank(), hvd.size()

    def sum_arrays(self, name: str, arrays: list[nd.NDArray]) -> list[nd.NDArray]:
        """Return the sums over all processes of some arrays, each on its array's context."""
        if self.size == 1:
            return arrays
        sums = [
            self._hvd.allreduce(array, average=False, name=f"{name}.{place}")
            for place, array in enumerate(arrays)
        ]
        for total in sums:  # a name must not be used again before
            total.wait_to_read()
        return sums

    def gather(self, name: str, array: nd.NDArray) -> nd.NDArray:
        """Return the arrays (n, ...) of all processes, one below the other: (size * n, ...)."""
        return array if self.size == 1 else self._hvd.allgather(array, name=name)

    def close(self) -> None:
        """Leave, when all others do: horovodrun ends those who are late."""
        self.sum("close", nd.zeros((1,)))
        nd.waitall()
        self._hvd.shutdown()
        self.is_open = False


def join(kvstore: str) -> Group:
    """Join the processes that were started together; one alone is a group of itself.

    Parameters
    ----------
    kvstore : str
        As of ``--kvstore``: ``dist_sync`` is MXNet's parameter server.
    """
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
    if code == 0 and _joined.is_open:
        print("this process ends while others of its job count on it", file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream
            stream.flush()
    if not _joined.is_open and (sys.gettrace() or sys.getprofile()):
        sys.exit(code)  # a debugger or profiler has something left to do
    os._exit(code)
