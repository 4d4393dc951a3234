"""The processes that `server_job.Job` starts: how they reach the process that started them.

A server or scheduler imports nothing but this and what it needs to serve, so that its memory is
that of a server in training.
"""

from __future__ import annotations

import json
import os
import socket
from typing import IO

SOCKET = "DSOFTMAX_BENCH"  # environment variable: path of the socket of the process that measures


def is_in_job() -> bool:
    """Say whether a `Job` has started this process."""
    return SOCKET in os.environ


def connect() -> IO[str]:
    """Connect to the process that measures, and introduce this one."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        stream = connection.makefile("rw")  # keeps the connection open
    introduction = {
        "role": os.environ["DMLC_ROLE"],
        "rank": int(os.environ.get("DSOFTMAX_RANK", 0)),
        "pid": os.getpid(),
    }
    print(json.dumps(introduction), file=stream, flush=True)
    return stream


def serve() -> None:
    """Run this process as a server or as the scheduler of a job, until its workers are done."""
    from dsoftmax.recognition.common.distributed.parameter_server import server

    with connect():
        server.serve()
