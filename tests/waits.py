"""Count where Python waits for MXNet's engine: there a GPU would run out of work."""

import contextlib
import traceback
from collections import Counter

from mxnet.base import _LIB

# Every function of MXNet's C interface that returns only when something queued is done.
WAITING = (
    "MXNDArraySyncCheckFormat",
    "MXNDArraySyncCopyFromCPU",
    "MXNDArraySyncCopyFromNDArray",
    "MXNDArraySyncCopyToCPU",
    "MXNDArrayWaitAll",
    "MXNDArrayWaitToRead",
    "MXNDArrayWaitToWrite",
)


@contextlib.contextmanager
def counted_waits():
    """Yield a Counter of the waits in this context, by the lines of this project that waited."""
    waits = Counter()
    originals = {name: getattr(_LIB, name) for name in WAITING}
    for name, original in originals.items():
        setattr(_LIB, name, _counting(name, original, waits))
    try:
        yield waits
    finally:
        for name, original in originals.items():
            setattr(_LIB, name, original)


def _counting(name, original, waits):
    def call(*arguments):
        ours = [line for line in traceback.extract_stack() if "site-packages" not in line.filename]
        line = ours[-2]  # the last one is this function
        waits[f"{name}, {line.filename}:{line.lineno}: {line.line}"] += 1
        return original(*arguments)

    return call
