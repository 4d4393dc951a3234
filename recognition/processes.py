"""The processes of a training job: how this one joins them, and how it leaves."""

from __future__ import annotations

import os
import sys
import traceback

from mxnet import nd

from dsoftmax.losses.groups import ALONE, Group
from dsoftmax.losses.servers import ServerGroup

# What the launchers of Horovod (Gloo, Open MPI) tell their processes.
HOROVOD_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")


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


def join(kvstore: str) -> Group:
    """Join the processes that were started together; one alone is a group of itself.

    Parameters
    ----------
    kvstore : str
        As of ``--kvstore``: ``dist_sync`` is MXNet's parameter server.
    """
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
    return group


def _die_at_once(kind, error, trace) -> None:
    traceback.print_exception(kind, error, trace)
    leave(1)


def leave(code: int) -> None:
    """End this process; in a group at once, as an engine may wait for processes that wait for it.

    Whoever started the group sees the code and stops the others.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.excepthook is _die_at_once:
        os._exit(code)
    sys.exit(code)
