"""How many bytes a training step moves: class rows, and what processes exchange."""

from __future__ import annotations

from typing import NamedTuple

from dsoftmax.losses.stores.base import FLOAT_BYTES
from dsoftmax.recognition.estimate import HeadSize


class Traffic(NamedTuple):
    """Bytes per step of one process."""

    rows: int  # class rows that its devices use
    fetched: int  # of these rows, from the host or the servers to the devices
    returned: int  # of their gradients, the other way
    sums: int  # of everything that processes add up, each way

    def between_hosts(self, has_servers: bool) -> int:
        """Return the bytes that the process sends, and as many it receives, over the network."""
        return self.sums + (self.returned if has_servers else 0)


def of_process(head: HeadSize, parameters: int) -> Traffic:
    """Count the bytes of a step of one process.

    Parameters
    ----------
    head : HeadSize
    parameters : int
        Of the network, whose gradients processes add up.
    """
    rows = head.used_rows * (head.devices // head.processes)
    moved = FLOAT_BYTES * head.embedding_size * rows if head.is_fetched else 0
    sums = 0
    if head.processes > 1:
        # Embeddings, the gradients of z_y and of n, z_y; three sums per sample of each process.
        vectors = 3 * head.batch_size * head.embedding_size + head.batch_size
        sums = FLOAT_BYTES * (parameters + vectors + 3 * head.batch_size * head.processes)
    return Traffic(rows, moved, moved, sums)
