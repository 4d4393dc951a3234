"""Jobs of small programs."""

import os
import signal

import pytest

from tests.small_jobs import Launched


@pytest.fixture
def launched(tmp_path):
    launched = Launched(tmp_path)
    yield launched
    if launched.process is not None:
        launched.process.kill()
        launched.process.communicate(timeout=5)
    for pid in launched.left():
        os.kill(pid, signal.SIGKILL)
