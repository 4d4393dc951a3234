"""Horovod's processes."""

from __future__ import annotations

from mxnet import nd

from dsoftmax.recognition.common.distributed.group import Group


class HorovodGroup(Group):
    """The processes that ``horovodrun`` started."""

    def __init__(self):
        try:
            import horovod.mxnet as hvd
        except ImportError as error:
            raise ValueError(
                "this process was started by horovodrun, but Horovod can't be imported here "
                f"({error}): see 'Horovod' in recognition/README.md for how to install it"
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
        """Leave the group together with all others: horovodrun kills latecomers."""
        self.sum("close", nd.zeros((1,)))
        nd.waitall()
        self._hvd.shutdown()
        self.is_open = False
